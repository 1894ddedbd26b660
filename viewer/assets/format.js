// Formats numbers for people.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Bytes in a few characters. */
export function bytes(value) {
  let unit = 0;
  let left = Math.max(value, 0);
  while (left >= 1000 && unit + 1 < UNITS.length) {
    left /= 1024;
    unit += 1;
  }
  return `${left.toFixed(unit > 0 && left < 100 ? 1 : 0)} ${UNITS[unit]}`;
}

/** Bytes per second. */
export const rate = (value) => `${bytes(value)}/s`;

/** A share in whole percent; a dash if it is not known. */
export const percent = (share) => (share == null ? "—" : `${(share * 100).toFixed(0)} %`);

/** A number with its noun: `1 host`, `2 hosts`. */
export const count = (number, of) => `${number} ${of}${number === 1 ? "" : "s"}`;

/** A time in seconds, with a suitable unit and precision. */
export function duration(seconds) {
  if (seconds > 0 && seconds < 0.01) return `${Number((seconds * 1000).toPrecision(2))} ms`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${(minutes / 60).toFixed(1)} h`;
}

/** Numbers as ranges: 0-3, 5. */
export function ranges(numbers) {
  const found = [];
  for (const number of [...numbers].sort((one, other) => one - other)) {
    const last = found.at(-1);
    if (last && last[1] + 1 === number) last[1] = number;
    else found.push([number, number]);
  }
  return found.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(", ");
}
