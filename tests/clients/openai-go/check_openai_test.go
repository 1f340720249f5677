// openai-go: embeddings and models.
package check

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
)

const model = "all-MiniLM-L6-v2"

// Texts, and their vectors from plain HTTP.
var expected struct {
	Texts      []string
	Embeddings [][]float64
}

func TestMain(m *testing.M) {
	content, err := os.ReadFile(os.Getenv("EXPECTED_FILE"))
	if err == nil {
		err = json.Unmarshal(content, &expected)
	}
	if err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

func connect(url string, options ...option.RequestOption) openai.Client {
	options = append([]option.RequestOption{option.WithBaseURL(url + "/v1"), option.WithAPIKey("any")}, options...)
	return openai.NewClient(options...)
}

func list(texts []string) openai.EmbeddingNewParams {
	return openai.EmbeddingNewParams{Model: model, Input: openai.EmbeddingNewParamsInputUnion{OfArrayOfStrings: texts}}
}

func create(t *testing.T, params openai.EmbeddingNewParams) *openai.CreateEmbeddingResponse {
	t.Helper()
	client := connect(os.Getenv("SERVER_URL"))
	answer, err := client.Embeddings.New(context.Background(), params)
	if err != nil {
		t.Fatal(err)
	}
	if answer.Usage.PromptTokens < 2 || answer.Usage.TotalTokens != answer.Usage.PromptTokens {
		t.Fatalf("usage is %+v", answer.Usage)
	}
	return answer
}

func assertClose(t *testing.T, found [][]float64, vectors [][]float64) {
	t.Helper()
	if len(found) != len(vectors) {
		t.Fatalf("%d vectors instead of %d", len(found), len(vectors))
	}
	for i, vector := range vectors {
		if len(found[i]) != len(vector) {
			t.Fatalf("%d numbers instead of %d", len(found[i]), len(vector))
		}
		for j, value := range vector {
			if math.Abs(found[i][j]-value) > 1e-6 {
				t.Fatalf("vector %d: %v is not %v", i, found[i][j], value)
			}
		}
	}
}

func vectors(answer *openai.CreateEmbeddingResponse) (rows [][]float64) {
	for _, row := range answer.Data {
		rows = append(rows, row.Embedding)
	}
	return rows
}

func TestEmbeddingsEqualPlainHTTP(t *testing.T) {
	assertClose(t, vectors(create(t, list(expected.Texts))), expected.Embeddings) // requests no format
	one := openai.EmbeddingNewParams{Model: model}
	one.Input.OfString = openai.String(expected.Texts[0])
	assertClose(t, vectors(create(t, one)), expected.Embeddings[:1])
	ids := openai.EmbeddingNewParams{Model: model}
	ids.Input.OfArrayOfTokenArrays = [][]int64{{101, 2460, 102}} // "short"
	assertClose(t, vectors(create(t, ids)), expected.Embeddings[1:2])
}

func TestOptionsAreSent(t *testing.T) {
	params := list(expected.Texts)
	params.EncodingFormat = openai.EmbeddingNewParamsEncodingFormatFloat
	params.Dimensions = openai.Int(384)
	params.User = openai.String("a-user")
	assertClose(t, vectors(create(t, params)), expected.Embeddings)
}

func TestBase64EqualsFloats(t *testing.T) {
	params := list(expected.Texts)
	params.EncodingFormat = openai.EmbeddingNewParamsEncodingFormatBase64
	var rows [][]float64
	for _, row := range create(t, params).Data { // typed as floats; the text is in the raw JSON
		var text string
		if err := json.Unmarshal([]byte(row.JSON.Embedding.Raw()), &text); err != nil {
			t.Fatal(err)
		}
		content, err := base64.StdEncoding.DecodeString(text)
		if err != nil {
			t.Fatal(err)
		}
		var row []float64
		for chunk := range slices.Chunk(content, 4) {
			row = append(row, float64(math.Float32frombits(binary.LittleEndian.Uint32(chunk))))
		}
		rows = append(rows, row)
	}
	assertClose(t, rows, expected.Embeddings)
}

func TestModelsAreListed(t *testing.T) {
	client := connect(os.Getenv("SERVER_URL"))
	page, err := client.Models.List(context.Background())
	if err != nil || len(page.Data) != 1 {
		t.Fatal(page, err)
	}
	found, err := client.Models.Get(context.Background(), model)
	if err != nil || found.ID != model {
		t.Fatal(found, err)
	}
}

func TestErrorsHaveStatusAndMessage(t *testing.T) {
	unknown, narrow := list(expected.Texts), list(expected.Texts)
	unknown.Model = "unknown"
	narrow.Dimensions = openai.Int(100)
	for _, each := range []struct {
		params                       openai.EmbeddingNewParams
		status                       int
		param, code, part, url, name string
	}{
		{unknown, 404, "model", "model_not_found", "'unknown'", os.Getenv("SERVER_URL"), "model"},
		{narrow, 400, "dimensions", "", "dimensions is 100", os.Getenv("SERVER_URL"), "dimensions"},
		{list([]string{}), 400, "input", "", "empty list", os.Getenv("SERVER_URL"), "list"},
		{list(expected.Texts), 401, "", "invalid_api_key", "key", os.Getenv("PROTECTED_URL"), "key"},
	} {
		t.Run(each.name, func(t *testing.T) {
			client := connect(each.url)
			_, err := client.Embeddings.New(context.Background(), each.params)
			var found *openai.Error
			if !errors.As(err, &found) {
				t.Fatal(err)
			}
			if found.StatusCode != each.status || found.Param != each.param || found.Code != each.code {
				t.Fatal(found.StatusCode, found.RawJSON())
			}
			if !strings.Contains(found.Message, each.part) {
				t.Fatal(found.Message)
			}
		})
	}
}

func TestAPIKeyIsAccepted(t *testing.T) {
	client := connect(os.Getenv("PROTECTED_URL"), option.WithAPIKey(os.Getenv("PROTECTED_KEY")))
	answer, err := client.Embeddings.New(context.Background(), list(expected.Texts))
	if err != nil {
		t.Fatal(err)
	}
	assertClose(t, vectors(answer), expected.Embeddings)
}

// The request is sent at most three times.
func TestRejectedRequestsAreRepeated(t *testing.T) {
	for _, each := range []struct{ status, rejections, sent int }{
		{429, 2, 3}, {503, 2, 3}, {429, 9, 3}, {503, 9, 3}, {408, 9, 1}, {400, 9, 1},
	} {
		t.Run(fmt.Sprint(each), func(t *testing.T) {
			t.Parallel()
			url := fmt.Sprintf("%s/%d/%d/go", os.Getenv("REJECTING_URL"), each.status, each.rejections)
			client := connect(url)
			answer, err := client.Embeddings.New(context.Background(), list(expected.Texts))
			if each.rejections == 2 {
				if err != nil {
					t.Fatal(err)
				}
				assertClose(t, vectors(answer), expected.Embeddings)
			} else {
				var found *openai.Error
				if !errors.As(err, &found) || found.StatusCode != each.status {
					t.Fatal(err)
				}
			}
			response, err := http.Get(url)
			if err != nil {
				t.Fatal(err)
			}
			defer response.Body.Close()
			sent, err := io.ReadAll(response.Body)
			if err != nil || string(sent) != fmt.Sprint(each.sent) {
				t.Fatal(string(sent), err)
			}
		})
	}
}
