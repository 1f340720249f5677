import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.fasterxml.jackson.annotation.JsonIgnoreProperties;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.openai.client.OpenAIClient;
import com.openai.client.okhttp.OpenAIOkHttpClient;
import com.openai.errors.OpenAIServiceException;
import com.openai.models.embeddings.CreateEmbeddingResponse;
import com.openai.models.embeddings.EmbeddingCreateParams;
import com.openai.models.embeddings.EmbeddingCreateParams.EncodingFormat;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.Arguments;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.MethodSource;

/** openai-java: embeddings and models. */
class CheckOpenai {
    static final String MODEL = "all-MiniLM-L6-v2";
    static final String URL = System.getenv("SERVER_URL");
    static final String PROTECTED_URL = System.getenv("PROTECTED_URL");
    static final Expected EXPECTED = Expected.read();

    /** Texts, and their vectors from plain HTTP. */
    @JsonIgnoreProperties(ignoreUnknown = true)
    record Expected(List<String> texts, List<List<Float>> embeddings) {
        static Expected read() {
            try {
                return new ObjectMapper().readValue(Path.of(System.getenv("EXPECTED_FILE")).toFile(), Expected.class);
            } catch (java.io.IOException error) {
                throw new java.io.UncheckedIOException(error);
            }
        }
    }

    static OpenAIClient connect(String url, String key) {
        return OpenAIOkHttpClient.builder().baseUrl(url + "/v1").apiKey(key).build();
    }

    static EmbeddingCreateParams.Builder request() {
        return EmbeddingCreateParams.builder().model(MODEL).inputOfArrayOfStrings(EXPECTED.texts());
    }

    static CreateEmbeddingResponse create(EmbeddingCreateParams.Builder request) {
        CreateEmbeddingResponse answer = connect(URL, "any").embeddings().create(request.build());
        assertTrue(answer.usage().promptTokens() > 1);
        return answer;
    }

    static List<List<Float>> vectors(CreateEmbeddingResponse answer) {
        return answer.data().stream().map(row -> row.embedding()).toList();
    }

    static void assertClose(List<List<Float>> found, List<List<Float>> vectors) {
        assertEquals(vectors.size(), found.size());
        for (int i = 0; i < vectors.size(); i++) {
            assertEquals(vectors.get(i).size(), found.get(i).size());
            for (int j = 0; j < vectors.get(i).size(); j++) {
                assertEquals(vectors.get(i).get(j), found.get(i).get(j), 1e-6);
            }
        }
    }

    @Test
    void embeddingsEqualPlainHttp() {
        assertClose(vectors(create(request())), EXPECTED.embeddings()); // requests base64
        assertClose(vectors(create(request().input(EXPECTED.texts().get(0)))), EXPECTED.embeddings().subList(0, 1));
        List<List<Long>> ids = List.of(List.of(101L, 2460L, 102L)); // "short"
        assertClose(vectors(create(request().inputOfArrayOfTokenArrays(ids))), EXPECTED.embeddings().subList(1, 2));
    }

    @Test
    void optionsAreSent() {
        EmbeddingCreateParams.Builder options = request().dimensions(384).encodingFormat(EncodingFormat.FLOAT);
        assertClose(vectors(create(options.user("a-user"))), EXPECTED.embeddings());
    }

    @Test
    void base64EqualsFloats() {
        List<List<Float>> rows = new ArrayList<>();
        for (var row : create(request().encodingFormat(EncodingFormat.BASE64)).data()) {
            ByteBuffer content = ByteBuffer.wrap(Base64.getDecoder().decode(row.embeddingValue().asBase64()));
            content.order(ByteOrder.LITTLE_ENDIAN);
            List<Float> values = new ArrayList<>();
            while (content.hasRemaining()) {
                values.add(content.getFloat());
            }
            rows.add(values);
        }
        assertClose(rows, EXPECTED.embeddings());
    }

    @Test
    void modelsAreListed() {
        assertEquals(1, connect(URL, "any").models().list().data().size());
        assertEquals(MODEL, connect(URL, "any").models().retrieve(MODEL).id());
    }

    static Stream<Arguments> wrongRequests() {
        return Stream.of(
                Arguments.of(URL, request().model("unknown"), 404, "model", "model_not_found", "'unknown'"),
                Arguments.of(URL, request().dimensions(100), 400, "dimensions", null, "dimensions is 100"),
                Arguments.of(URL, request().inputOfArrayOfStrings(List.of()), 400, "input", null, "empty list"),
                Arguments.of(PROTECTED_URL, request(), 401, null, "invalid_api_key", "key"));
    }

    @ParameterizedTest
    @MethodSource("wrongRequests")
    void errorsHaveStatusAndMessage(
            String url, EmbeddingCreateParams.Builder request, int status, String param, String code, String part) {
        OpenAIServiceException error = assertThrows(
                OpenAIServiceException.class, () -> connect(url, "wrong").embeddings().create(request.build()));
        assertEquals(status, error.statusCode());
        assertEquals(param, error.param().orElse(null));
        assertEquals(code, error.code().orElse(null));
        assertTrue(error.getMessage().contains(part), error.getMessage());
    }

    @Test
    void apiKeyIsAccepted() {
        OpenAIClient client = connect(PROTECTED_URL, System.getenv("PROTECTED_KEY"));
        assertClose(vectors(client.embeddings().create(request().build())), EXPECTED.embeddings());
    }

    /** The request is sent at most three times. */
    @ParameterizedTest
    @CsvSource({"429, 2, 3", "503, 2, 3", "429, 9, 3", "503, 9, 3", "408, 9, 1", "400, 9, 1"})
    void rejectedRequestsAreRepeated(int status, int rejections, int sent) throws Exception {
        String url = "%s/%d/%d/java".formatted(System.getenv("REJECTING_URL"), status, rejections);
        OpenAIClient client = connect(url, "any");
        if (rejections == 2) {
            assertClose(vectors(client.embeddings().create(request().build())), EXPECTED.embeddings());
        } else {
            OpenAIServiceException error = assertThrows(
                    OpenAIServiceException.class, () -> client.embeddings().create(request().build()));
            assertEquals(status, error.statusCode());
        }
        HttpRequest count = HttpRequest.newBuilder(URI.create(url)).build();
        String counted = HttpClient.newHttpClient().send(count, HttpResponse.BodyHandlers.ofString()).body();
        assertEquals(Integer.toString(sent), counted);
    }
}
