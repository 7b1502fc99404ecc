// The policy that answers: its version, its lag and its held-out score. The service's policy events say when to refresh.

import { get, stream } from "./api.js";
import { byId, make, setText, visible } from "./dom.js";
import { counted, number, percent } from "./numbers.js";
import { untilHidden, whenVisible } from "./wait.js";

const FIRST_WAIT_MS = 1000;
const SLOWEST_WAIT_MS = 2500;
const REFRESH_AFTER_MS = 100;

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
          this.#refreshSoon();
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
    const held = [Number.isFinite(policy.pinned) ? `pinned to version ${number(policy.pinned)}` : "", policy.paused ? "paused" : ""].filter(Boolean);
    byId("serving").classList.remove("bad");
    setText(byId("serving"), [`version ${number(policy.policy_version)}`, lag, ...held].join(" · "));
    const { score } = policy;
    const solves = score ? ["solves ", make("b", {}, percent(score.accuracy)), " of its held-out problems"] : ["has no score yet"];
    setText(byId("about-run"), visible(policy.run ?? ""));
    byId("about-score").replaceChildren(...solves);
  }

  /** Refresh once for events that come together: a stream begins with many. */
  #refreshSoon() {
    this.#soon ??= setTimeout(() => {
      this.#soon = null;
      this.refresh().catch(() => {});
      this.#onChange();
    }, REFRESH_AFTER_MS);
  }
}
