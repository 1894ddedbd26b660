// One bar for each rank: how it spends its time, and so who is slow and why.

import { byId, each, make, setText } from "./dom.js";
import { percent } from "./format.js";
import { openRank } from "./rank.js";

/** The parts of a bar, in their order, and what a rank does then. */
const PARTS = [
  ["compute", "computes"],
  ["ranks", "waits for other ranks"],
  ["negotiation", "negotiation"],
  ["transfer", "transfer"],
  ["copies", "copies"],
];

/** The most bars: the ranks that the others wait for most. */
const MOST = 64;

/** How much a new snapshot counts. Reports are of one second, and bars should not jump. */
const NEW = 0.2;

/** The smoothed parts by rank. */
const smoothed = new Map();

function smooth({ rank, time }) {
  const before = smoothed.get(rank);
  const mean = ([part]) => [part, before ? before[part] * (1 - NEW) + time[part] * NEW : time[part]];
  const parts = Object.fromEntries(PARTS.map(mean));
  smoothed.set(rank, parts);
  return parts;
}

/** Shows a bar for each rank. `waits` has how long the others wait for each. */
export function showBars(job, waits) {
  const ranks = job.nodes.flatMap(({ host, report }) =>
    (report?.ranks ?? []).map((rank) => ({ rank: rank.rank, host, parts: smooth(rank) })));
  const count = ranks.length;
  const first = [job.failure?.rank, job.straggler];
  const by = (key) => ranks.sort((one, other) => key(one.rank) - key(other.rank));
  if (count > MOST) {
    by((rank) => (first.includes(rank) ? -2 : -(waits.get(rank) ?? 0)));
    ranks.length = MOST;
  }
  // What matters most comes first, and the others stay where they are.
  by((rank) => (first.includes(rank) ? first.indexOf(rank) - 2 : rank));
  setText(byId("bars-legend"), legend(count));
  each(byId("bars-key"), PARTS, () => make("li", "", make("i"), make("span")), keyOf);
  const create = () => {
    const bar = make("span", "bar", ...PARTS.map(([part]) => make("i", `part-${part}`)));
    bar.setAttribute("aria-hidden", "true");
    const button = make("button", "", make("span", "who"), bar, make("span", "why"));
    button.type = "button";
    button.addEventListener("click", () => openRank(Number(button.dataset.rank), button));
    return make("li", "", button);
  };
  each(byId("bars"), ranks, create, (item, { rank, host, parts }) => {
    const button = item.firstElementChild;
    const [who, bar, why] = button.children;
    button.dataset.rank = rank;
    const state = rank === job.failure?.rank ? "failed" : rank === job.straggler ? "slow" : "";
    button.className = state;
    setText(who, `rank ${rank}`);
    setText(why, state === "failed" ? state : main(parts, state === "slow"));
    PARTS.forEach(([part], at) => {
      bar.children[at].style.flexGrow = parts[part].toFixed(3);
    });
    const words = PARTS.map(([part, does]) => `${does} ${percent(parts[part])}`).join(", ");
    const says = `rank ${rank} on ${host}${state && `, ${state}`}: ${words}`;
    button.title = says;
    button.setAttribute("aria-label", says);
  });
}

function keyOf(item, [part, does]) {
  item.firstElementChild.className = `part-${part}`;
  setText(item.lastElementChild, does);
}

function legend(count) {
  const text = "The time of each rank. A slow rank computes while the others wait for it. " +
    "A bar opens what the rank does now.";
  return count > MOST
    ? `${text} These are the ${MOST} of ${count} ranks that the others wait for most.`
    : text;
}

/** What a rank does most. If it isn't slow and waits at all, what it waits for most. */
function main(parts, slow) {
  const [most] = largest(PARTS, parts);
  const [waits] = largest(PARTS.slice(1), parts);
  const [part, does] = !slow && parts[waits[0]] >= 0.1 ? waits : most;
  return `${does} ${percent(parts[part])}`;
}

/** The parts by their share, the largest first. */
function largest(some, parts) {
  return [...some].sort(([one], [other]) => parts[other] - parts[one]);
}
