// The map of links: a table for few hosts, a picture for many. The table of the busiest links shows
// the same as text.

import { byId, fillTable, make, setText } from "./dom.js";
import { percent, rate } from "./format.js";

/** Up to this number of hosts the map is a table. */
const MOST_IN_TABLE = 16;

/** The size of a link in the picture, in pixels. */
const CELL = { most: 16, least: 3 };

/** How many of the busiest links are listed. */
const LISTED = 16;

/**
 * The traffic between each pair of hosts: `{from, to, rate, share}`. A host reports only its busiest
 * peers, so the reports of receivers are used, too.
 */
export function flows(nodes) {
  const known = new Map();
  nodes.forEach(({ report }, at) => {
    for (const peer of report?.peers ?? []) {
      const add = (from, to, bytes) => {
        const key = from * nodes.length + to;
        if (bytes <= (known.get(key)?.rate ?? -1)) return;
        const line = nodes[from]?.report?.line_bytes_per_second;
        known.set(key, { from, to, rate: bytes, share: line ? bytes / line : null });
      };
      add(at, peer.node, peer.sent_bytes_per_second);
      add(peer.node, at, peer.received_bytes_per_second);
    }
  });
  return [...known.values()];
}

/** Shows the links of these nodes. */
export function showLinks(nodes) {
  const all = flows(nodes);
  const map = byId("map");
  const kind = nodes.length <= MOST_IN_TABLE ? "table" : "canvas";
  if (map.firstElementChild?.localName !== kind) map.replaceChildren(make(kind));
  const name = (at) => nodes[at]?.host ?? `${at}`;
  if (kind === "table") showTable(map.firstElementChild, nodes, all);
  else showPicture(map.firstElementChild, nodes, all, name);
  setText(byId("links-legend"), legend(kind));

  const busiest = all.filter((flow) => flow.rate > 0).sort((one, other) => other.rate - one.rate);
  fillTable(byId("busiest"), {
    heads: ["From", "To", "Rate", "Share of the line"],
    rows: busiest.slice(0, LISTED).map(({ from, to, rate: bytes, share }) => ({
      cells: [name(from), name(to), { number: rate(bytes) }, { number: percent(share) }],
    })),
    none: nodes.length > 1 ? "No traffic between hosts." : "One host has no links.",
  });
}

function legend(kind) {
  const text = "Traffic from the host of a row to the host of a column, as a share of its line";
  return kind === "table"
    ? `${text}, or in bytes per second if the rate of the line is unknown.`
    : `${text}: darker means more. The table below lists the busiest links.`;
}

function showTable(table, nodes, all) {
  const cells = new Map(all.map((flow) => [`${flow.from} ${flow.to}`, flow]));
  const row = (node, from) => {
    const cell = (_, to) => {
      const flow = cells.get(`${from} ${to}`);
      const text = flow?.share == null ? rate(flow?.rate ?? 0) : percent(flow.share);
      return { number: from === to ? "—" : text, share: Math.min(flow?.share ?? 0, 1) };
    };
    return { cells: [node.host, ...nodes.map(cell)] };
  };
  fillTable(table, {
    heads: ["From \\ to", ...nodes.map((node) => node.host)],
    rows: nodes.length > 1 ? nodes.map(row) : [],
    none: "One host has no links.",
  });
}

function showPicture(canvas, nodes, all, name) {
  const room = canvas.parentElement.clientWidth - 2;
  const cell = Math.max(CELL.least, Math.min(CELL.most, Math.floor(room / nodes.length)));
  const side = cell * nodes.length;
  if (canvas.width !== side) canvas.width = canvas.height = side;
  const fullest = all.reduce((most, flow) => Math.max(most, flow.share ?? 0), 0);
  const most = all.reduce((found, flow) => (flow.rate > (found?.rate ?? 0) ? flow : found), null);
  const summary = most
    ? `The busiest link is from ${name(most.from)} to ${name(most.to)}: ${rate(most.rate)}.`
    : "No traffic between hosts.";
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `Map of the links of ${nodes.length} hosts. ${summary}`);
  const color = getComputedStyle(canvas).getPropertyValue("--heat").trim();
  const paint = canvas.getContext("2d");
  paint.clearRect(0, 0, side, side);
  // If no rate of a line is known, the busiest link is the darkest.
  const scale = fullest > 0 ? 1 : most?.rate || 1;
  for (const { from, to, rate: bytes, share } of all) {
    const strength = Math.min(fullest > 0 ? share ?? 0 : bytes / scale, 1);
    if (strength <= 0) continue;
    paint.fillStyle = `rgb(${color} / ${Math.max(strength, 0.08)})`;
    paint.fillRect(to * cell, from * cell, cell, cell);
  }
}
