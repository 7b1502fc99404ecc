// The view of a run: curves that grow, completions to read, the pools and their health.

import { get } from "./api.js";
import { byId, make, setFacts, setText, shortened, visible } from "./dom.js";
import { RunHistory } from "./history.js";
import { duration, number, percent } from "./numbers.js";
import { CURVES, Plot } from "./plots.js";
import { whenVisible } from "./wait.js";

const POLL_MS = 2000;
const SLOWEST_POLL_MS = 2500;
const NUM_SAMPLES = 12;
const MAX_CELL_CHARS = 4000;
const PHASES = { sft: "supervised fine-tuning", rl: "reinforcement learning", control: "the control", done: "complete" };
const COLUMNS = [
  ["round", "Round", (round) => number(round + 1)],
  ["policy_version", "Version", number],
  ["reward", "Reward", number],
  ["correct", "Correct", percent],
  ["kl", "KL", number],
  ["mean_staleness", "Staleness", number],
  ["tokens_per_s", "Tokens/s", number],
  ["loss", "Loss", number],
];
const NUM_ROUNDS = 20;

/** Polls the run while someone looks at it. */
export class RunView {
  #history = new RunHistory();
  #plots = CURVES.map((spec) => new Plot(spec));
  #run = null;
  #turn = 0;

  #ask;

  /** `ask` is called with a prompt that is to be asked again. */
  constructor(ask) {
    this.#ask = ask;
    byId("curves").append(...this.#plots.map((plot) => plot.element));
    byId("round-table").tHead.rows[0].append(...COLUMNS.map(([, title]) => make("th", { scope: "col" }, title)));
  }

  /** Begin to follow; what was followed before is forgotten. */
  start() {
    this.#turn += 1;
    this.#history = new RunHistory();
    this.#run = null;
    this.#follow(this.#turn);
  }

  async #follow(turn) {
    let waitMs = POLL_MS;
    for (;;) {
      await whenVisible(byId("view-run"));
      if (turn !== this.#turn) {
        return;
      }
      try {
        await this.#poll(turn);
        waitMs = POLL_MS;
        this.#notice("");
      } catch (error) {
        if (turn !== this.#turn || error.status === 401 || error.status === 403) {
          return;
        }
        if (error.code === "no_run") {
          this.#showNoRun();
          return;
        }
        waitMs = Math.min(SLOWEST_POLL_MS, 2 * waitMs);
        this.#notice(`${visible(error.message)} Trying again in ${duration(waitMs / 1000)}.`);
      }
      await new Promise((resolve) => setTimeout(resolve, waitMs));
    }
  }

  async #poll(turn) {
    // What it says of the phase, the history says too, sooner.
    this.#run ??= await get("v1/run");
    const [samples, pools] = await Promise.all([get(`v1/run/samples?limit=${NUM_SAMPLES}`), get("v1/run/pools")]);
    for (let had = null; had === null || had !== this.#history.newest.next; ) {
      had = this.#history.newest?.next ?? "";
      const part = await get(`v1/run/history${had && `?after=${had}`}`);
      if (turn !== this.#turn) {
        return;
      }
      this.#history.add(part);
    }
    this.#showRun();
    this.#showCurves();
    showSamples(samples.samples, this.#ask);
    this.#showPools(pools);
  }

  #showRun() {
    const { newest, evaluations } = this.#history;
    const run = this.#run;
    const planned = newest.num_planned_rounds || run.num_rounds;
    const last = newest.newest_round;
    setText(byId("run-title"), visible(run.name));
    const name = newest.phase ?? run.phase ?? "";
    const phase = newest.is_finished ? "complete" : (PHASES[name] ?? visible(name));
    setText(byId("run-phase"), phase);
    byId("run-phase").classList.toggle("is-live", !newest.is_finished);
    const evaluation = evaluations.findLast((item) => item.line === "policy");
    setFacts(byId("run-facts"), [
      ["Round", last ? `${number(last.round + 1)}${planned ? ` of ${number(planned)}` : ""}` : "–"],
      ["Reward", last ? number(last.reward) : "–"],
      ["Held-out accuracy", evaluation ? percent(evaluation.accuracy) : "–"],
      ["Time", duration(newest.seconds)],
    ]);
  }

  #showCurves() {
    for (const plot of this.#plots) {
      plot.show(this.#history);
    }
    const rounds = this.#history.rounds.slice(-NUM_ROUNDS).reverse();
    byId("round-table").tBodies[0].replaceChildren(
      ...rounds.map((round) => make("tr", {}, ...COLUMNS.map(([key, , format]) => make("td", {}, format(round[key]))))),
    );
  }

  #showPools({ replicas = [], follower }) {
    const rows = replicas.map((replica) =>
      make(
        "tr",
        {},
        make("th", { scope: "row" }, shortened(replica.id, 40)),
        make("td", { class: replica.healthy ? "good" : "bad" }, replica.healthy ? "✓ healthy" : "✗ not answering"),
        make("td", {}, number(replica.policy_version)),
        make("td", {}, number(replica.running)),
        make("td", {}, number(replica.waiting)),
      ),
    );
    const none = make("tr", {}, make("td", { colspan: "5" }, "No replica is up."));
    byId("replicas").tBodies[0].replaceChildren(...(rows.length > 0 ? rows : [none]));
    const { newest } = this.#history;
    const last = newest.newest_round ?? {};
    const ungraded = typeof last.num_ungraded === "object" ? sum(Object.values(last.num_ungraded ?? {})) : last.num_ungraded;
    setFacts(byId("pool-facts"), [
      ["Samplers, last round", poolWords(last.pools?.samplers)],
      ["Graders, last round", poolWords(last.pools?.graders)],
      ["Completions, last round", `${number(last.num_completions)} graded, ${number(ungraded ?? 0)} not, ${number(last.num_failed_groups ?? 0)} groups lost`],
      ["Portions tried again", number(last.num_retries)],
      ["Failures the run survived", number(newest.num_failures)],
      ...(newest.num_unreadable > 0 ? [["Events that could not be read", number(newest.num_unreadable)]] : []),
      ["Registry", followerWords(follower)],
    ]);
  }

  #showNoRun() {
    byId("view-run").classList.add("no-run");
    this.#notice("This service answers from a checkpoint without a run, so there is nothing to follow here. Asking works as ever.");
    setText(byId("run-phase"), "");
  }

  #notice(text) {
    byId("run-notice").hidden = text === "";
    setText(byId("run-notice"), text);
  }
}

let shownSamples = "";

function showSamples(samples, ask) {
  // Rows stay as they are while nothing is new: a reader may have selected text, or opened one.
  const key = JSON.stringify(samples);
  if (key === shownSamples) {
    return;
  }
  shownSamples = key;
  const rows = samples.toReversed().map((sample) =>
    make(
      "tr",
      {},
      cell("Round", number(sample.round + 1)),
      cell("Prompt", text(sample.prompt), asker(sample.prompt, ask)),
      cell("Completion", text(sample.completion)),
      cell("Reward", make("div", { class: "reward" }, make("b", {}, number(sample.reward)), parts(sample.reward_parts))),
      cell("Outcome", make("span", { class: sample.correct ? "good" : "bad" }, outcome(sample))),
    ),
  );
  const none = make("tr", {}, make("td", { colspan: "5" }, "No completion has been kept yet."));
  byId("samples").tBodies[0].replaceChildren(...(rows.length > 0 ? rows : [none]));
}

const cell = (title, ...children) => make("td", { "data-title": title }, ...children);

function text(value) {
  return make("div", { class: "model-text", dir: "auto", tabindex: "0", role: "group", "aria-label": "Text" }, shortened(value ?? "", MAX_CELL_CHARS));
}

/** Asks the policy that answers now what this one was asked. */
function asker(prompt, ask) {
  const button = make("button", { type: "button", class: "quiet" }, "Ask this");
  button.addEventListener("click", () => ask(String(prompt ?? "")));
  return button;
}

function parts(values) {
  const pairs = Object.entries(values ?? {}).map(([name, value]) => make("div", {}, make("dt", {}, shortened(name, 40)), make("dd", {}, number(value))));
  return make("dl", { class: "parts" }, ...pairs);
}

function outcome(sample) {
  if (sample.outcome !== "graded") {
    return `✗ not graded: ${shortened(sample.outcome ?? "", 40)}`;
  }
  return sample.correct ? "✓ right" : "✗ wrong";
}

function poolWords(pool) {
  if (!pool) {
    return "–";
  }
  const health = pool.away > 0 ? `✗ ${number(pool.away)} restarting` : "✓ all answer";
  return `${number(pool.size)}, ${health}, at work ${percent(pool.busy)} of the time`;
}

function followerWords(follower) {
  if (!follower) {
    return "–";
  }
  const reach = follower.registry_reachable === false ? "not reachable" : "reachable";
  return follower.last_error ? `${reach}; last error: ${shortened(follower.last_error, 200)}` : reach;
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
