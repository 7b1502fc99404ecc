// Numbers as people read them.

/** Three significant digits, thousands apart; a dash for what is not there. */
export function number(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) {
    return "–";
  }
  if (value !== 0 && (Math.abs(value) >= 1e7 || Math.abs(value) < 1e-4)) {
    return value.toExponential(1).replace("e+", "e");
  }
  const digits = Math.abs(value) >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 3 };
  return value.toLocaleString("en", digits);
}

/** A share as a percentage with one decimal. */
export function percent(share) {
  return typeof share === "number" && Number.isFinite(share) ? `${(100 * share).toFixed(1)} %` : "–";
}

/** Seconds as people say them: `0.4 s`, `42 s`, `3 min 05 s`, `2 h 07 min`. */
export function duration(seconds) {
  const whole = Math.round(seconds);
  const two = (value) => String(value).padStart(2, "0");
  if (seconds < 10) {
    return `${seconds.toFixed(1)} s`;
  }
  if (whole < 60) {
    return `${whole} s`;
  }
  if (whole < 3600) {
    return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  }
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
}

/** `1 slot`, `2 slots`. */
export function counted(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}
