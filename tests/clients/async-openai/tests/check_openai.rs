//! async-openai: embeddings and models.

use async_openai::Client;
use async_openai::config::OpenAIConfig;
use async_openai::error::{ApiErrorResponse, OpenAIError};
use async_openai::types::embeddings::{
    CreateEmbeddingRequest, CreateEmbeddingRequestArgs, CreateEmbeddingResponse, EncodingFormat,
};
use base64::prelude::{BASE64_STANDARD, Engine};
use serde::Deserialize;

const MODEL: &str = "all-MiniLM-L6-v2";

/// Texts, and their vectors from plain HTTP.
#[derive(Deserialize)]
struct Expected {
    texts: Vec<String>,
    embeddings: Vec<Vec<f32>>,
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap()
}

fn expected() -> Expected {
    serde_json::from_slice(&std::fs::read(variable("EXPECTED_FILE")).unwrap()).unwrap()
}

fn connect(url: &str, key: &str) -> Client<OpenAIConfig> {
    Client::with_config(OpenAIConfig::new().with_api_base(format!("{url}/v1")).with_api_key(key))
}

fn request() -> CreateEmbeddingRequestArgs {
    let mut request = CreateEmbeddingRequestArgs::default();
    request.model(MODEL).input(expected().texts);
    request
}

async fn create(request: CreateEmbeddingRequest) -> Vec<Vec<f32>> {
    let answer = connect(&variable("SERVER_URL"), "any").embeddings().create(request).await.unwrap();
    assert!(answer.usage.prompt_tokens > 1);
    vectors(answer)
}

fn vectors(answer: CreateEmbeddingResponse) -> Vec<Vec<f32>> {
    answer.data.into_iter().map(|row| row.embedding).collect()
}

fn assert_close(found: &[Vec<f32>], vectors: &[Vec<f32>]) {
    assert_eq!(found.len(), vectors.len());
    for (row, vector) in found.iter().zip(vectors) {
        assert_eq!(row.len(), vector.len());
        for (one, other) in row.iter().zip(vector) {
            assert!((one - other).abs() <= 1e-6, "{one} is not {other}");
        }
    }
}

fn rejection(error: OpenAIError) -> ApiErrorResponse {
    match error {
        OpenAIError::ApiError(response) => response,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn embeddings_equal_plain_http() {
    let all = expected();
    assert_close(&create(request().build().unwrap()).await, &all.embeddings);
    let one = request().input(all.texts[0].as_str()).build().unwrap();
    assert_close(&create(one).await, &all.embeddings[..1]);
    let ids = request().input([[101, 2460, 102]]).build().unwrap(); // "short"
    assert_close(&create(ids).await, &all.embeddings[1..2]);
}

#[tokio::test]
async fn options_are_sent() {
    let options = request().dimensions(384_u32).encoding_format(EncodingFormat::Float).user("a-user").build().unwrap();
    assert_close(&create(options).await, &expected().embeddings);
}

#[tokio::test]
async fn base64_equals_floats() {
    let encoded = request().encoding_format(EncodingFormat::Base64).build().unwrap();
    let answer = connect(&variable("SERVER_URL"), "any").embeddings().create_base64(encoded).await.unwrap();
    let decode = |text: &str| {
        let content = BASE64_STANDARD.decode(text).unwrap();
        content.chunks_exact(4).map(|chunk| f32::from_le_bytes(chunk.try_into().unwrap())).collect()
    };
    let rows: Vec<Vec<f32>> = answer.data.iter().map(|row| decode(&row.embedding.0)).collect();
    assert_close(&rows, &expected().embeddings);
}

#[tokio::test]
async fn models_are_listed() {
    let client = connect(&variable("SERVER_URL"), "any");
    assert_eq!(client.models().list().await.unwrap().data.len(), 1);
    assert_eq!(client.models().retrieve(MODEL).await.unwrap().id, MODEL);
}

#[tokio::test]
async fn errors_have_status_and_message() {
    let (open, protected) = (variable("SERVER_URL"), variable("PROTECTED_URL"));
    let none: Vec<String> = Vec::new();
    for (url, wrong, status, param, code, part) in [
        (&open, request().model("unknown").build(), 404, Some("model"), Some("model_not_found"), "'unknown'"),
        (&open, request().dimensions(100_u32).build(), 400, Some("dimensions"), None, "dimensions is 100"),
        (&open, request().input(none).build(), 400, Some("input"), None, "empty list"),
        (&protected, request().build(), 401, None, Some("invalid_api_key"), "key"),
    ] {
        let error = rejection(connect(url, "wrong").embeddings().create(wrong.unwrap()).await.unwrap_err());
        assert_eq!(error.status_code.as_u16(), status);
        assert_eq!((error.api_error.param.as_deref(), error.api_error.code.as_deref()), (param, code));
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[tokio::test]
async fn api_key_is_accepted() {
    let client = connect(&variable("PROTECTED_URL"), &variable("PROTECTED_KEY"));
    let answer = client.embeddings().create(request().build().unwrap()).await.unwrap();
    assert_close(&vectors(answer), &expected().embeddings);
}

/// The request is sent at most four times.
#[tokio::test]
async fn rejected_requests_are_repeated() {
    for (status, rejections, sent) in [(429, 2, 3), (503, 2, 3), (429, 9, 4), (503, 9, 4), (408, 9, 1), (400, 9, 1)] {
        let url = format!("{}/{status}/{rejections}/rust", variable("REJECTING_URL"));
        let answer = connect(&url, "any").embeddings().create(request().build().unwrap()).await;
        if rejections == 2 {
            assert_close(&vectors(answer.unwrap()), &expected().embeddings);
        } else {
            assert_eq!(rejection(answer.unwrap_err()).status_code.as_u16(), status);
        }
        let counted = reqwest::get(&url).await.unwrap().text().await.unwrap();
        assert_eq!(counted, sent.to_string(), "{status} {rejections}");
    }
}
