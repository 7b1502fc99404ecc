// What the policy does, and problems to ask it: those that its run is evaluated on.

import { get } from "./api.js";
import { byId, make, setText, visible } from "./dom.js";

const MAX_CHIPS = 6;

/** Show the task and its problems; `ask` is called with the one that is chosen. A service without a run has none. */
export async function showProblems(ask) {
  const { task = null, prompts = [] } = await get("v1/run/problems").catch(() => ({}));
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
