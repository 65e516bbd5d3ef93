// Numbers as people read them. null is what was not observed.

const NONE = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (value) => (value === null ? NONE : whole.format(value));
export const short = (value) => (value === null ? NONE : Math.abs(value) < 10000 ? whole.format(value) : compact.format(value));
export const percent = (share) => (share === null ? NONE : `${(100 * share).toFixed(share < 0.1 && share > 0 ? 1 : 0)} %`);

/** Milliseconds, as seconds from one second on. */
export function duration(ms) {
  if (ms === null) return NONE;
  if (ms === 0) return "0";
  if (ms >= 1000) return `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
  return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
}

export function rate(value) {
  if (value === null) return NONE;
  return value > 0 && value < 10 ? value.toFixed(1) : short(Math.round(value));
}

/** The time of day of a Unix time. */
export function clock(unix, seconds = true) {
  const options = { hour: "2-digit", minute: "2-digit", second: seconds ? "2-digit" : undefined, hourCycle: "h23" };
  return new Date(unix * 1000).toLocaleTimeString("en-GB", options);
}

export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;
