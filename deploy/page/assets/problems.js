// The policy's task, and example prompts: held-out problems of its run, or those of a model card.

import { get } from "./api.js";
import { byId, make, setText, visible } from "./dom.js";

const MAX_CHIPS = 6;

/** Show the task and its problems; `ask` is called with the one that is chosen. A service without a run has none. */
export async function showProblems(ask) {
  const { task = null, prompts = [] } = await get("v1/policy/examples").catch(() => ({}));
  const chips = prompts.slice(0, MAX_CHIPS).map((prompt) => chip(String(prompt), ask));
  byId("chips").replaceChildren(...chips);
  byId("chips").hidden = chips.length === 0;
  byId("about").hidden = task === null;
  setText(byId("about-task"), visible(task ?? ""));
}

function chip(prompt, ask) {
  const button = make("button", { type: "button", title: visible(prompt) }, visible(prompt.replaceAll("\n", " ")));
  button.addEventListener("click", () => ask(prompt));
  return make("li", {}, button);
}
