// Example texts in English for each task.

const PAIRS = ["Four pairs", {
  texts: `I forgot my password and cannot sign in.
How do I get back into my account?
The parcel still has not arrived.
Where is my delivery?
Slice the onions and fry them in butter.
A recipe for vegetable soup.
Storms are expected this weekend.
It will rain heavily until Sunday.`,
}];
const MEANINGS = ["One word, two meanings", {
  texts: `The bank raised its interest rates again.
Borrowing money has become more expensive.
A bat flew out of the cave at dusk.
Small animals that hang upside down and hunt insects at night.
He swung the bat and missed the ball.
The batter struck out in the last inning.`,
}];
const PARAGRAPHS = ["Paragraphs", {
  texts: `A dam holds back the water of a river.
Behind it, a lake fills up, and what flows out can be chosen.

Water that falls from a height turns a wheel.
Power stations in the mountains live on that.

The orchestra tunes its instruments.
Then the lights go out, and the first notes are heard.`,
}];
const REFUND = ["Refunds", {
  query: "How can I get my money back?",
  documents: `Money cannot buy happiness, but it helps.
Refunds are paid within five days of receiving the returned goods.
Our offices are closed on public holidays.
To send an item back, print the label from your account.
Gift cards cannot be exchanged for cash.`,
}];
const BREAD = ["Bread", {
  query: "What keeps bread from going stale?",
  documents: `Knead the dough for ten minutes and let it rise.
Bread keeps best in a cloth bag at room temperature; the fridge dries it out.
The bakery opens at six in the morning.
Freeze what you will not eat within two days.`,
}];
const TOPICS = ["Topics", {
  texts: `My card was declined at the till.
Which films are on tonight?
They scored in the last minute.`,
  labels: "banking\ncinema\nsport",
}];
const TONES = ["Tones", {
  texts: `What a lovely idea, thank you so much!
You are an idiot and nobody likes you.
The meeting has been moved to Thursday.`,
  labels: "kind\nrude\nneutral",
}];
const NAMES = ["Names", {
  texts: `Ada Lovelace was born in London in 1815.
The United Nations have their seat in New York.`,
}];
const PIECES = ["Pieces", {
  texts: `Penstocks carry water to the turbines of a hydroelectric power station.
Antidisestablishmentarianism, 3.14159 and naïve café-goers`,
}];

// Task to its fields: name in the examples to element id.
const FIELDS = {
  embed: { texts: "embed-texts" },
  rerank: { query: "rerank-query", documents: "rerank-documents" },
  score: { query: "score-left", documents: "score-right" },
  classify: { texts: "classify-texts", labels: "classify-labels" },
  sparse: { texts: "sparse-texts" },
  multi: { query: "multi-query", documents: "multi-documents" },
  tokenize: { texts: "tokenize-texts" },
};
const given = {};  // Task to the example in its fields.

function examplesOf(task) {
  if (task === "classify") {
    return { embedding: [TOPICS, TONES], token_classifier: [NAMES] }[facts().kind] ?? [TONES, TOPICS];
  }
  return {
    embed: [PAIRS, MEANINGS, PARAGRAPHS], rerank: [REFUND, BREAD], score: [REFUND, BREAD],
    sparse: [PAIRS, MEANINGS], multi: [REFUND, BREAD], tokenize: [PIECES, PARAGRAPHS],
  }[task];
}

function useExample(task, example) {
  given[task] = example;
  for (const [name, id] of Object.entries(FIELDS[task])) $(id).value = example[1][name] ?? "";
  if (task === current) countShown();
  const buttons = examplesOf(task).map((own) => {
    const button = make("button", { type: "button", class: "quiet" }, own[0]);
    button.addEventListener("click", () => useExample(task, own));
    return button;
  });
  document.querySelector(`#${task} .examples`).replaceChildren("Examples", ...buttons);
}

// Returns whether the fields still hold the example, without changes by the user.
function isUntouched(task) {
  const own = given[task]?.[1] ?? {};
  return Object.entries(FIELDS[task]).every(([name, id]) => $(id).value === (own[name] ?? ""));
}
