// The curves: which there are, and how uPlot draws them. Numbers only; no text of the model comes here.

import { make, setText } from "./dom.js";
import { movingMean, number, percent } from "./numbers.js";
import uPlot from "./vendor/uPlot.esm.js";

const HEIGHT = 190;

/** One curve in its frame, with what it says in words. */
export class Plot {
  #spec;
  #plot = null;
  #data = null;
  #title;
  #value;
  #empty;
  #chart;
  #summary;

  /**
   * `spec.lines` are `{name, color, faint, mean, points}` (a mean is drawn and not read out); `spec.data(history)` gives one list of x and one of y for each
   * line; `spec.bars(history)`, if there, the ends of an interval around the points of each line, as shares.
   */
  constructor(spec) {
    this.#spec = spec;
    this.#title = make("h3", {}, spec.title);
    this.#value = make("p", { class: "plot-value" });
    this.#chart = make("div", { class: "chart", role: "img", "aria-label": `${spec.title}: nothing yet` });
    this.#empty = make("p", { class: "plot-empty" }, spec.empty);
    this.#summary = make("p", { class: "plot-axis" }, spec.axis);
    this.element = make("article", { class: "plot", id: `plot-${spec.id}` }, make("header", {}, this.#title, this.#value), this.#chart, this.#empty, this.#summary);
    new ResizeObserver(() => this.#resize()).observe(this.#chart);
    window.addEventListener("themechange", () => this.#rebuild());
  }

  /** Draw what there is. */
  show(history) {
    const data = this.#spec.data(history);
    const isEmpty = data[0].length === 0;
    this.element.classList.toggle("is-empty", isEmpty);
    this.#empty.hidden = !isEmpty;
    this.#chart.hidden = isEmpty;
    this.#summary.hidden = isEmpty;
    this.#data = data;
    this.bars = this.#spec.bars?.(history) ?? [];
    if (isEmpty) {
      this.#plot?.destroy();
      this.#plot = null;
      setText(this.#value, "");
      return;
    }
    this.element.dataset.points = String(data[0].length);
    this.#chart.setAttribute("aria-label", this.#words());
    this.#readOut(null);
    if (this.#plot === null) {
      this.#rebuild();
    } else {
      this.#plot.setData(data);
    }
  }

  #words() {
    const { title, lines, format, xName } = this.#spec;
    const [xs, ...series] = this.#data;
    const parts = lines.flatMap((line, index) => {
      const last = lastOf(series[index]);
      return line.mean || last < 0 ? [] : [`${line.name} ${format(series[index][last])} at ${xName} ${number(xs[last])}`];
    });
    return `${title}: ${parts.join(", ")}`;
  }

  /** The numbers under the pointer, or the newest. */
  #readOut(index) {
    const { lines, format, xName } = this.#spec;
    const [xs, ...series] = this.#data;
    const isOne = lines.filter((line, row) => !line.mean && lastOf(series[row]) >= 0).length === 1;
    const parts = lines.flatMap((line, row) => {
      const at = index ?? lastOf(series[row]);
      const value = series[row][at];
      if (line.mean || typeof value !== "number") {
        return [];
      }
      const bar = this.bars[row]?.[at];
      const interval = bar ? ` (${bar.map((end) => (100 * end).toFixed(1)).join(" to ")})` : "";
      return [make("span", { class: `key ${line.color}` }, isOne ? "" : `${line.name} `, make("b", {}, format(value)), interval)];
    });
    const where = index === null ? [] : [make("span", { class: "at" }, `${xName} ${number(xs[index])}`)];
    this.#value.replaceChildren(...parts, ...where);
  }

  #resize() {
    if (this.#plot !== null && this.#chart.clientWidth > 0) {
      this.#plot.setSize({ width: this.#chart.clientWidth, height: HEIGHT });
    }
  }

  #rebuild() {
    if (this.#data === null || this.#data[0].length === 0) {
      return;
    }
    this.#plot?.destroy();
    this.#chart.replaceChildren();
    this.#plot = new uPlot(this.#options(), this.#data, this.#chart);
  }

  #options() {
    const { lines, id, range, format, sync } = this.#spec;
    const ink = colorOf(this.#chart, "axis");
    const grid = colorOf(this.#chart, "grid");
    const font = `11px ${getComputedStyle(this.#chart).fontFamily}`;
    const axis = { stroke: ink, font, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    return {
      id: `uplot-${id}`,
      width: Math.max(200, this.#chart.clientWidth),
      height: HEIGHT,
      legend: { show: false },
      cursor: { points: { size: 6 }, drag: { x: false, y: false }, y: false, ...(sync ? { sync: { key: sync } } : {}) },
      padding: [8, 16, 0, 0],
      scales: { x: { time: false, range: xRange }, y: { range } },
      axes: [
        { ...axis, size: 26, gap: 4, space: 60, values: (_, ticks) => ticks.map(number) },
        { ...axis, size: 48, gap: 6, space: 36, values: (_, ticks) => ticks.map((tick) => format(tick, true)) },
      ],
      series: [
        {},
        ...lines.map((line) => {
          const color = colorOf(this.#chart, line.color);
          return {
            label: line.name,
            stroke: line.faint ? colorOf(this.#chart, `${line.color}-faint`) : color,
            width: line.faint ? 1 : 2,
            spanGaps: line.points === true,
            points: line.points ? { show: true, size: 7, fill: color, stroke: color } : { show: this.#data[0].length === 1 },
          };
        }),
      ],
      hooks: {
        setCursor: [(plot) => this.#readOut(plot.cursor.idx ?? null)],
        draw: [(plot) => this.#drawBars(plot)],
      },
    };
  }

  #drawBars(plot) {
    const { ctx, data } = plot;
    ctx.save();
    ctx.lineWidth = 1.5 * devicePixelRatio;
    this.bars.forEach((bars, row) => {
      ctx.strokeStyle = colorOf(this.#chart, this.#spec.lines[row].color);
      bars.forEach((bar, index) => {
        if (bar) {
          const x = plot.valToPos(data[0][index], "x", true);
          ctx.beginPath();
          ctx.moveTo(x, plot.valToPos(bar[0], "y", true));
          ctx.lineTo(x, plot.valToPos(bar[1], "y", true));
          ctx.stroke();
        }
      });
    });
    ctx.restore();
  }
}

function lastOf(values) {
  return values.findLastIndex((value) => typeof value === "number");
}

function xRange(_, low, high) {
  return low === high ? [low - 1, high + 1] : [low, high];
}

/** A colour of the style sheet as this theme has it: a canvas cannot read custom properties. */
function colorOf(element, name) {
  const probe = make("span", { class: `color-${name}`, hidden: true });
  element.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

/** From zero, or from below it, with some air above. */
function fromZero(_, low, high) {
  const top = high > 0 ? high * 1.08 : 1;
  return [Math.min(0, low ?? 0), low === null ? 1 : top];
}

/** A share's range: from zero up to at most one. */
function ofShares(_, low, high) {
  return [Math.min(0, low ?? 0), Math.max(0.05, high <= 1 ? Math.min(1, (high ?? 1) * 1.15) : (high ?? 1) * 1.08)];
}

const roundsOf = (history) => history.rounds.map(({ round }) => round + 1);

function smoothed(history, key) {
  const values = history.rounds.map((round) => round[key]);
  return [values, movingMean(values, Math.max(1, Math.floor(values.length / 20)))];
}

function ofRounds({ id, title, key, name, color, format = number, range = fromZero, axis = "by round", empty = "Comes with the first round." }) {
  return {
    id,
    title,
    axis,
    empty,
    format,
    range,
    xName: "round",
    sync: "rounds",
    lines: [
      { name, color, faint: true },
      { name, color, mean: true },
    ],
    data: (history) => {
      const lines = smoothed(history, key);
      return lines[0].some((value) => value !== null) ? [roundsOf(history), ...lines] : [[], [], []];
    },
  };
}

/** From left to right: the control comes last, and stands where its training ended. */
const asDrawn = (evaluations) => evaluations.toSorted((a, b) => a.drawn_s - b.drawn_s);

/** Something of each evaluation, for the lines of the policy, of the control and of the validation problems. */
function byLine(items, valueOf) {
  return ["policy", "control", "validation"].map((line) => items.map((item) => (item.line === line ? valueOf(item) : null)));
}

const ACCURACY = {
  id: "accuracy",
  title: "Held-out accuracy",
  axis: "by minutes, with the 95 % interval",
  empty: "Comes with the first evaluation.",
  xName: "minute",
  format: (share, isTick) => (isTick ? `${number(100 * share)} %` : percent(share)),
  range: (plot, low, high) => ofShares(plot, low, Math.min(1, (high ?? 0) * 1.1)),
  lines: [
    { name: "policy", color: "red", points: true },
    { name: "control", color: "green", points: true },
    { name: "validation", color: "blue", points: true },
  ],
  data: (history) => {
    const items = asDrawn(history.evaluations);
    return [items.map((item) => item.drawn_s / 60), ...byLine(items, (item) => item.accuracy)];
  },
  bars: (history) => byLine(asDrawn(history.evaluations), (item) => [item.low, item.high]),
};

const SFT_LOSS = {
  id: "sft",
  title: "SFT loss",
  axis: "by optimizer step",
  empty: "This run has no SFT yet.",
  xName: "step",
  format: number,
  range: fromZero,
  lines: [
    { name: "loss", color: "blue", faint: true },
    { name: "loss", color: "blue", mean: true },
  ],
  data: (history) => {
    const losses = history.steps.map(({ loss }) => loss);
    return [history.steps.map(({ step }) => step), losses, movingMean(losses, Math.max(1, Math.floor(losses.length / 20)))];
  },
};

/** Every curve of the run view, in its order. */
export const CURVES = [
  ofRounds({ id: "reward", title: "Reward", key: "reward", name: "reward", color: "red" }),
  ACCURACY,
  ofRounds({ id: "kl", title: "KL to the reference", key: "kl", name: "KL", color: "cyan", axis: "by round, nats per token", empty: "This run measures no KL yet." }),
  ofRounds({ id: "staleness", title: "Staleness", key: "mean_staleness", name: "staleness", color: "purple", axis: "by round, mean versions behind the learner" }),
  ofRounds({ id: "throughput", title: "Throughput", key: "tokens_per_s", name: "tokens per second", color: "green", axis: "by round, completion tokens per second" }),
  SFT_LOSS,
];
