import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.fasterxml.jackson.annotation.JsonIgnoreProperties;
import com.fasterxml.jackson.databind.ObjectMapper;
import dev.langchain4j.data.embedding.Embedding;
import dev.langchain4j.data.segment.TextSegment;
import dev.langchain4j.exception.AuthenticationException;
import dev.langchain4j.exception.InternalServerException;
import dev.langchain4j.exception.InvalidRequestException;
import dev.langchain4j.exception.LangChain4jException;
import dev.langchain4j.exception.ModelNotFoundException;
import dev.langchain4j.exception.RateLimitException;
import dev.langchain4j.exception.TimeoutException;
import dev.langchain4j.model.openai.OpenAiEmbeddingModel;
import dev.langchain4j.model.openai.OpenAiEmbeddingModel.OpenAiEmbeddingModelBuilder;
import dev.langchain4j.model.output.Response;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.file.Path;
import java.util.List;
import java.util.Map;
import java.util.stream.IntStream;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.Arguments;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.MethodSource;

/** langchain4j-open-ai: OpenAiEmbeddingModel. */
class CheckLangchain4j {
    static final String MODEL = "all-MiniLM-L6-v2";
    static final String URL = System.getenv("SERVER_URL");
    static final String PROTECTED_URL = System.getenv("PROTECTED_URL");
    static final Expected EXPECTED = Expected.read();

    /** Texts, and their vectors from plain HTTP. */
    @JsonIgnoreProperties(ignoreUnknown = true)
    record Expected(List<String> texts, List<float[]> embeddings) {
        static Expected read() {
            try {
                return new ObjectMapper().readValue(Path.of(System.getenv("EXPECTED_FILE")).toFile(), Expected.class);
            } catch (java.io.IOException error) {
                throw new java.io.UncheckedIOException(error);
            }
        }

        List<TextSegment> segments() {
            return texts.stream().map(TextSegment::from).toList();
        }
    }

    static OpenAiEmbeddingModelBuilder connect(String url, String key) {
        return OpenAiEmbeddingModel.builder().baseUrl(url + "/v1").apiKey(key).modelName(MODEL);
    }

    static void assertClose(List<Embedding> found, List<float[]> vectors) {
        assertEquals(vectors.size(), found.size());
        for (int i = 0; i < vectors.size(); i++) {
            float[] vector = found.get(i).vector();
            assertEquals(vectors.get(i).length, vector.length);
            for (int j = 0; j < vector.length; j++) {
                assertEquals(vectors.get(i)[j], vector[j], 1e-6);
            }
        }
    }

    @ParameterizedTest
    @CsvSource(value = {"null", "float", "base64"}, nullValues = "null")
    void embeddingsEqualPlainHttp(String format) {
        OpenAiEmbeddingModel model = connect(URL, "any").encodingFormat(format).dimensions(384).user("a-user").build();
        Response<List<Embedding>> answer = model.embedAll(EXPECTED.segments());
        assertClose(answer.content(), EXPECTED.embeddings());
        assertTrue(answer.tokenUsage().inputTokenCount() > EXPECTED.texts().size());
        assertEquals(384, model.dimension());
        Embedding one = model.embed(EXPECTED.texts().get(0)).content();
        assertClose(List.of(one), EXPECTED.embeddings().subList(0, 1));
    }

    @Test
    void longListIsSentInSeveralRequests() {
        List<TextSegment> segments = IntStream.range(0, 5000).mapToObj(i -> TextSegment.from("text " + i)).toList();
        OpenAiEmbeddingModel model = connect(URL, "any").build();
        List<Embedding> all = model.embedAll(segments).content();
        assertEquals(5000, all.size());
        assertClose(List.of(model.embed("text 4999").content()), List.of(all.get(4999).vector()));
    }

    @Test
    void customParametersAreSent() {
        List<TextSegment> tooLong = List.of(TextSegment.from("word ".repeat(1000)));
        OpenAiEmbeddingModel model =
                connect(URL, "any").customParameters(Map.of("truncate_prompt_tokens", 10)).build();
        assertEquals(10, model.embedAll(tooLong).tokenUsage().inputTokenCount());
    }

    static Stream<Arguments> wrongRequests() {
        return Stream.of(
                Arguments.of(connect(URL, "any").modelName("unknown"), ModelNotFoundException.class, "'unknown'"),
                Arguments.of(connect(URL, "any").dimensions(100), InvalidRequestException.class, "dimensions is 100"),
                Arguments.of(connect(PROTECTED_URL, "wrong"), AuthenticationException.class, "key"));
    }

    @ParameterizedTest
    @MethodSource("wrongRequests")
    void errorsAreTyped(OpenAiEmbeddingModelBuilder wrong, Class<? extends Exception> kind, String part) {
        Exception error = assertThrows(kind, () -> wrong.build().embedAll(EXPECTED.segments()));
        assertTrue(error.getMessage().contains(part), error.getMessage());
    }

    @Test
    void apiKeyIsAccepted() {
        OpenAiEmbeddingModel model = connect(PROTECTED_URL, System.getenv("PROTECTED_KEY")).build();
        assertClose(model.embedAll(EXPECTED.segments()).content(), EXPECTED.embeddings());
    }

    static Stream<Arguments> rejections() {
        return Stream.of(
                Arguments.of(429, 2, 3, null),
                Arguments.of(503, 2, 3, null),
                Arguments.of(429, 9, 3, RateLimitException.class),
                Arguments.of(503, 9, 3, InternalServerException.class),
                Arguments.of(408, 9, 3, TimeoutException.class),
                Arguments.of(400, 9, 1, InvalidRequestException.class));
    }

    /** The request is sent at most three times. */
    @ParameterizedTest
    @MethodSource
    void rejections(int status, int rejections, int sent, Class<? extends LangChain4jException> kind) throws Exception {
        String url = "%s/%d/%d/langchain4j".formatted(System.getenv("REJECTING_URL"), status, rejections);
        OpenAiEmbeddingModel model = connect(url, "any").build();
        if (kind == null) {
            assertClose(model.embedAll(EXPECTED.segments()).content(), EXPECTED.embeddings());
        } else {
            assertThrows(kind, () -> model.embedAll(EXPECTED.segments()));
        }
        HttpRequest count = HttpRequest.newBuilder(URI.create(url)).build();
        String counted = HttpClient.newHttpClient().send(count, HttpResponse.BodyHandlers.ofString()).body();
        assertEquals(Integer.toString(sent), counted);
    }
}
