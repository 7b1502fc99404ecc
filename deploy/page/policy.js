// Which policy answers, how far it is behind, and what has happened to its versions.

import { get, stream } from "./api.js";
import { byId, make, setFacts, setText, shortened, visible } from "./dom.js";
import { counted, duration, number, percent } from "./numbers.js";
import { untilHidden, whenVisible } from "./wait.js";

const FIRST_WAIT_MS = 1000;
const SLOWEST_WAIT_MS = 2500;
const MAX_EVENTS = 12;
const REFRESH_AFTER_MS = 100;
const WORDS = {
  published: "was published",
  serving: "answers",
  retired: "was retired",
  refused: "was refused",
  pinned: "was pinned",
  unpinned: "is no longer pinned",
  moved: "got another name",
  paused: "Swaps are paused",
  resumed: "Swaps go on",
  rebuilt: "The registry was rebuilt",
};
const OF_NO_VERSION = ["paused", "resumed", "rebuilt"];

/** Follows the service's policy events. */
export class PolicyWatch {
  #onChange;
  #turn = 0;
  #lastId = "";
  #current = null;
  #soon = null;

  /** `onChange` is called when the versions on offer may have changed. */
  constructor(onChange) {
    this.#onChange = onChange;
  }

  start() {
    this.#turn += 1;
    this.#lastId = "";
    this.#current?.abort();
    byId("policy-events").replaceChildren();
    this.#follow(this.#turn);
  }

  async #follow(turn) {
    let waitMs = FIRST_WAIT_MS;
    while (turn === this.#turn) {
      const sight = untilHidden();
      this.#current = sight;
      try {
        await this.refresh();
        this.#onChange();
        const headers = this.#lastId ? { "last-event-id": this.#lastId } : {};
        for await (const event of stream("v1/policy/events", { headers, signal: sight.signal })) {
          waitMs = FIRST_WAIT_MS;
          this.#lastId = event.id || this.#lastId;
          this.#take(event);
        }
      } catch (error) {
        if ([401, 403, 404].includes(error.status)) {
          return;
        }
        if (error.name === "AbortError") {
          waitMs = FIRST_WAIT_MS;
        } else {
          setText(byId("serving"), "not reachable");
          byId("serving").classList.add("bad");
        }
      } finally {
        sight.release();
      }
      await new Promise((resolve) => setTimeout(resolve, waitMs));
      waitMs = Math.min(SLOWEST_WAIT_MS, 2 * waitMs);
      await whenVisible();
    }
  }

  /** Ask which policy answers now. */
  async refresh() {
    const policy = await get("v1/policy");
    const behind = policy.lag?.behind ?? 0;
    const lag = behind > 0 ? `${counted(behind, "version")} behind` : "up to date";
    byId("serving").classList.remove("bad");
    const held = [policy.pinned === null || policy.pinned === undefined ? "" : `pinned to version ${number(policy.pinned)}`, policy.paused ? "paused" : ""].filter(Boolean);
    setText(byId("serving"), [`version ${number(policy.policy_version)}`, lag, ...held].join(" · "));
    const { score } = policy;
    const solves = score ? ["solves ", make("b", {}, percent(score.accuracy)), " of its held-out problems"] : ["has no score yet"];
    setText(byId("about-run"), visible(policy.run ?? ""));
    byId("about-score").replaceChildren(...solves);
    const refused = policy.refused ?? [];
    setFacts(byId("policy-facts"), [
      ["Answers", `version ${number(policy.policy_version)}${Number.isFinite(policy.round) ? `, round ${number(policy.round)}` : ""}`],
      ["Lag", `${lag}; newest published ${number(policy.lag?.published)}`],
      ["Held-out score", score ? `${percent(score.accuracy)} (${score.interval_95.map(percent).join(" to ")}), version ${number(score.policy_version)}` : "–"],
      ...(held.length > 0 ? [["Held", held.join(", ")]] : []),
      ["Swaps", number(policy.num_swaps)],
      ...(refused.length > 0 ? [["Refused", refused.map(({ version, why }) => `version ${version}: ${shortened(why, 200)}`).join("; ")]] : []),
      ...(policy.last_error ? [["Last error", shortened(policy.last_error, 300)]] : []),
    ]);
  }

  #take({ event, data }) {
    if (!(event in WORDS)) {
      return;
    }
    const { version, time_s: time, why } = JSON.parse(data);
    const when = Number.isFinite(time) ? make("span", { class: "when" }, clock(time)) : null;
    const who = OF_NO_VERSION.includes(event) ? "" : `version ${number(version)} `;
    const what = `${who}${WORDS[event]}${why ? `: ${shortened(why, 200)}` : ""}`;
    const list = byId("policy-events");
    list.prepend(make("li", { class: `is-${event}` }, visible(what), when));
    while (list.children.length > MAX_EVENTS) {
      list.lastElementChild.remove();
    }
    this.#refreshSoon();
  }

  /** Once for events that come together: the first of a stream are many. */
  #refreshSoon() {
    this.#soon ??= setTimeout(() => {
      this.#soon = null;
      this.refresh().catch(() => {});
      this.#onChange();
    }, REFRESH_AFTER_MS);
  }
}

/** `time_s` is seconds since the run began, or a Unix time where there is no run. */
function clock(seconds) {
  return seconds > 1e9 ? new Date(1000 * seconds).toLocaleTimeString() : `after ${duration(seconds)}`;
}
