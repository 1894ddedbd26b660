// The status page of a running job. It shows the snapshots of /api/v1/watch, and changes nothing.

import { showBars } from "./bars.js";
import { showCharts } from "./charts.js";
import { byId, each, fillTable, make, setText } from "./dom.js";
import { bytes, count, duration, percent, ranges } from "./format.js";
import { showLinks } from "./links.js";
import { openRank } from "./rank.js";
import { keepToken, watch } from "./source.js";

/** How many slow ranks are listed. */
const LISTED = 16;

/** With this many hosts or more, each gets one short line. */
const MANY = 48;

/** The number of the host that the reader has chosen. */
let chosen = null;

let newest = null;

/** Steps per second of a rank. A rank that stands still gets slower with time. */
function stepsPerSecond({ step_seconds: last, since_step_seconds: since }) {
  return last > 0 ? 1 / Math.max(last, since) : null;
}

function showSummary(job) {
  const { started, done } = job.operations;
  const ill = job.nodes.filter((node) => node.health !== "ok").length;
  const share = job.lags.find((lag) => lag.rank === job.straggler)?.share;
  const entries = [
    // The cause of a failure is above.
    ["Phase", job.phase, job.failure ? "" : job.reason],
    ["Steps per second", job.steps_per_second?.toFixed(2) ?? "none yet"],
    [
      "Straggler",
      job.straggler == null ? "none" : `rank ${job.straggler}`,
      job.straggler == null ? "" : `the others wait for it ${percent(share)} of the time`,
    ],
    ["Hosts", `${job.nodes.length}`, ill ? `${ill} not ok` : ""],
    ["Operations", `${done} done`, `${started - done} in flight`],
    ["Waiting tensors", `${job.pending_count}`],
    ["Running for", duration(job.uptime_seconds)],
  ];
  const create = () => make("div", "", make("dt"), make("dd", "", make("span"), make("small")));
  each(byId("summary"), entries, create, (entry, [name, value, more]) => {
    setText(entry.children[0], name);
    setText(entry.children[1].children[0], value);
    setText(entry.children[1].children[1], more ?? "");
  });
}

function showFailure({ failure }) {
  if (!failure) return setText(byId("failure"), "");
  const where = [
    failure.rank == null ? "" : `rank ${failure.rank}`,
    failure.host && `host ${failure.host}`,
    failure.tensor && `tensor '${failure.tensor}'`,
  ];
  const place = where.filter(Boolean).join(", ");
  const site = failure.site && ` (submitted at ${failure.site})`;
  const hint = failure.hint && ` ${failure.hint[0].toUpperCase()}${failure.hint.slice(1)}.`;
  const first = `The job failed${place && ` (${place})`}: ${failure.what}${site}.${hint}`;
  setText(byId("failure"), [first, ...failure.lines].join("\n"));
}

/** The share of the time in which the others wait for each rank. */
const waits = (job) => new Map(job.lags.map((lag) => [lag.rank, lag.share ?? 0]));

function ranksOf(node) {
  return Array.from({ length: node.ranks }, (_, at) => node.first_rank + at);
}

function describe(node) {
  const { first_rank: first, ranks } = node;
  if (ranks === 0) return "server";
  return ranks === 1 ? `rank ${first}` : `ranks ${first}-${first + ranks - 1}`;
}

function showHosts(job) {
  const waited = waits(job);
  byId("hosts").classList.toggle("many", job.nodes.length >= MANY);
  const create = () => {
    const parts = [make("span", "name"), make("span", "health"), make("span", "ranks")];
    const button = make("button", "", ...parts);
    button.type = "button";
    button.addEventListener("click", () => choose(button));
    button.addEventListener("keydown", moveFocus);
    return make("li", "", button);
  };
  each(byId("hosts"), job.nodes, create, (item, node, at) => {
    const button = item.firstElementChild;
    const [name, health, squares] = button.children;
    setText(name, node.host);
    setText(health, `${describe(node)}, ${node.health}`);
    button.className = { ok: "well", failed: "failed" }[node.health] ?? "ill";
    button.setAttribute("aria-pressed", `${at === chosen}`);
    button.tabIndex = at === (chosen ?? 0) ? 0 : -1;
    each(squares, ranksOf(node), () => make("span", "rank"), (square, rank) => {
      const share = waited.get(rank) ?? 0;
      square.style.setProperty("--share", share.toFixed(2));
      const failed = rank === job.failure?.rank;
      square.classList.toggle("left", node.left_ranks.includes(rank));
      square.classList.toggle("failed", failed);
      const waits = `the others wait for it ${percent(share)} of the time`;
      square.title = `rank ${rank}, ${failed ? "failed" : waits}`;
    });
    squares.setAttribute("aria-hidden", "true");
  });
}

function choose(button) {
  const at = [...byId("hosts").children].indexOf(button.parentElement);
  chosen = chosen === at ? null : at;
  if (newest) showHosts(newest), showHost(newest);
}

/** Arrow keys, Home and End move between hosts. */
function moveFocus(event) {
  const items = [...byId("hosts").children];
  const at = items.indexOf(event.currentTarget.parentElement);
  const columns = items.filter((item) => item.offsetTop === items[0].offsetTop).length;
  const to = {
    ArrowLeft: at - 1,
    ArrowRight: at + 1,
    ArrowUp: at - columns,
    ArrowDown: at + columns,
    Home: 0,
    End: items.length - 1,
  }[event.key];
  if (to === undefined || !items[to]) return;
  event.preventDefault();
  items[to].firstElementChild.focus();
}

/** The figures of the chosen host. */
function showHost(job) {
  const place = byId("host");
  const node = job.nodes[chosen];
  if (!node) return place.replaceChildren();
  if (!place.firstElementChild) {
    const table = make("div", "wide", make("table"));
    table.addEventListener("click", ({ target }) => {
      const button = target.closest("button");
      if (button) openRank(Number(button.dataset.rank), button);
    });
    table.tabIndex = 0;
    table.setAttribute("role", "group");
    table.setAttribute("aria-label", "Ranks of the host");
    // A screen reader announces the host, but not every figure twice per second.
    const head = make("h3");
    head.setAttribute("aria-live", "polite");
    place.append(head, make("p", "legend"), table);
  }
  const { report } = node;
  setText(place.children[0], `Host ${node.host}`);
  const figures = report && [
    count(report.pieces_in_flight, "piece") + " in flight",
    count(report.queued_tensors, "tensor") + " submitted",
    `memory ${bytes(report.resident_bytes)}, shared ${bytes(report.shared_bytes)}`,
  ];
  const rack = node.rack ? `rack ${node.rack}, ` : "";
  setText(place.children[1], rack + (figures?.join(", ") ?? "no report yet"));
  const waited = waits(job);
  fillTable(place.children[2].firstElementChild, {
    heads: ["Rank", "Steps", "Steps/s", "Blocked", "Others wait"],
    rows: (report?.ranks ?? []).map((rank) => ({
      slow: rank.rank === job.straggler,
      failed: rank.rank === job.failure?.rank,
      cells: [
        { button: `${rank.rank}`, rank: rank.rank },
        { number: `${rank.steps}` },
        { number: stepsPerSecond(rank)?.toFixed(2) ?? "—" },
        { number: percent(rank.exposed) },
        { number: percent(waited.get(rank.rank) ?? 0) },
      ],
    })),
    none: node.ranks ? "No report yet." : "A server has no ranks.",
  });
}

function showStragglers(job) {
  const host = (rank) => job.nodes.find((node) => ranksOf(node).includes(rank))?.host ?? "";
  const lags = job.lags.filter((lag) => lag.share > 0.001);
  lags.sort((one, other) => other.share - one.share);
  fillTable(byId("stragglers"), {
    heads: ["Rank", "Host", "Share of time", "Since the start", "Tensors"],
    rows: lags.slice(0, LISTED).map((lag) => ({
      slow: lag.rank === job.straggler,
      cells: [
        lag.rank === job.straggler ? `${lag.rank} (straggler)` : `${lag.rank}`,
        host(lag.rank),
        { number: percent(lag.share), share: lag.share },
        { number: duration(lag.seconds) },
        { number: `${lag.tensors}` },
      ],
    })),
    none: "No rank waits for another.",
  });
}

function showOperations(job) {
  fillTable(byId("operations"), {
    heads: ["Operation", "Running for", "Tensors", "Unfinished on hosts"],
    rows: job.operations.running.map((it) => {
      const more = it.tensor_count - it.tensors.length;
      const names = it.tensors.join(", ") + (more > 0 ? ` and ${more} more` : "");
      const missing = it.missing_nodes.map((at) => job.nodes[at]?.host ?? `${at}`);
      return { cells: [`${it.sequence}`, { number: duration(it.seconds) }, names, list(missing)] };
    }),
    none: "None.",
  });
  fillTable(byId("pending"), {
    caption: job.pending_count > job.pending.length
      ? `The oldest ${job.pending.length} of ${job.pending_count}.`
      : "",
    heads: ["Tensor", "Waiting for", "Missing ranks"],
    rows: job.pending.map((it) => ({
      cells: [it.name, { number: duration(it.waiting_seconds) }, ranges(it.missing_ranks)],
    })),
    none: "None.",
  });
}

/** The first names, and how many more there are. */
function list(names) {
  const more = names.length - 8;
  return names.slice(0, 8).join(", ") + (more > 0 ? ` and ${more} more` : "");
}

/** Each algorithm with its predicted and observed time, and the sentence behind it. */
function showChoices({ choices }) {
  const time = (seconds) => ({ number: seconds == null ? "—" : duration(seconds) });
  fillTable(byId("choices"), {
    heads: ["Collective", "Pieces", "Hosts", "Algorithm", "Predicted", "Observed", "Operations"],
    rows: choices.map((it) => ({
      cells: [
        it.collective,
        `up to ${bytes(it.bytes)}${it.pieces > 1 ? `, ${it.pieces} in a row` : ""}`,
        { number: `${it.nodes}` },
        { brief: it.algorithm, more: `${it.spec}. ${it.reason}` },
        time(it.predicted_seconds),
        time(it.observed_seconds),
        { number: `${it.operations}` },
      ],
    })),
    none: "Nothing has moved between hosts yet.",
  });
}

function showLog(place, entries) {
  const create = () => make("li", "", make("time"), make("span"));
  each(place, [...entries].reverse(), create, (item, { seconds, text }) => {
    setText(item.children[0], `${seconds.toFixed(1)} s`);
    setText(item.children[1], text);
  });
}

function connection(text) {
  setText(byId("connection"), text);
}

function showStatus(job) {
  newest = job;
  byId("content").hidden = false;
  byId("sign-in").hidden = true;
  connection("live");
  setText(byId("job"), job.job);
  document.title = `${job.failure ? "Failed: " : ""}${job.job} – Gradwire`;
  showFailure(job);
  showSummary(job);
  showHosts(job);
  showHost(job);
  showBars(job, waits(job));
  showCharts(job);
  showStragglers(job);
  showLinks(job.nodes);
  showOperations(job);
  showChoices(job);
  showLog(byId("decisions"), job.decisions);
  showLog(byId("events"), job.events);
}

const show = {
  status: showStatus,
  lost: (why) => connection(`${why}; this page is out of date. Trying again …`),
  over: (why) => connection(`${why}. This page shows the last known state.`),
  token(why) {
    connection(why);
    byId("content").hidden = true;
    byId("sign-in").hidden = false;
    byId("token").focus();
  },
};

byId("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken(byId("token").value.trim());
  byId("token").value = "";
  connection("sending the token …");
  watch(show);
});
connection("connecting …");
watch(show);
