// Rerank, score and classify.

const MAX_BARS = 12;

async function rerank(ask) {
  const documents = itemsOf("rerank", "rerank-documents");
  const answer = await ask("v2/rerank", { query: $("rerank-query").value, documents: documents.map(asInput) });
  const entries = answer.results.map((row) => {
    return { text: documents[row.index], score: row.relevance_score, place: `document ${row.index + 1}` };
  });
  return [[plural(entries.length, "document")], make("ol", { class: "bars" }, ...bars(entries))];
}

async function score(ask) {
  const left = texts("score-left"), right = texts("score-right");
  const answer = await ask("v1/score", { text_1: left, text_2: right });
  const entries = answer.data.map(({ index, score }) => {
    return { text: left.length > 1 ? [left[index], right[index]] : right[index], score };
  });
  return [[plural(entries.length, "pair")], make("ol", { class: "bars" }, ...bars(entries))];
}

async function classify(ask) {
  const input = texts("classify-texts");
  if (facts().kind === "token_classifier") return classesOfTokens(await ask("v1/classify", { input }), input);
  const labels = $("classify-own").hidden ? undefined : texts("classify-labels");
  const answer = await ask("v1/classify", { inputs: input, labels });
  const cards = answer.classifications.map((row, i) => {
    const entries = Object.entries(row.labels).map(([text, { confidence }]) => ({ text, score: confidence }));
    entries.sort((a, b) => b.score - a.score);
    const best = make("ol", { class: "bars" }, ...bars(entries.slice(0, MAX_BARS)));
    const rest = entries.length - MAX_BARS;
    const notes = rest > 0 ? [make("p", { class: "facts" }, `${rest} more with lower scores`)] : [];
    return card(input[i], best, ...notes);
  });
  return [[plural(cards.length, "text")], ...cards];
}

function classesOfTokens(answer, input) {
  const cards = answer.data.map((row, i) => {
    const chips = row.tokens.map(({ token, label, score }) => {
      const chip = make("span", { title: `${label} ${score.toFixed(4)}` }, token);
      if (label !== "O") {
        chip.classList.add("named");
        chip.append(make("b", {}, label));
      }
      return chip;
    });
    return card(input[i], make("div", { class: "tokens" }, ...chips));
  });
  return [[plural(cards.length, "text")], ...cards];
}
