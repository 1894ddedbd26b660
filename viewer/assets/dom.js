// Elements are changed in place, so that focus and scroll positions stay.
// Text is only set as text, so the name of a tensor or host can't become markup.

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** Sets the text of an element if it has changed. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Makes an element with classes and children: elements or texts. */
export function make(tag, classes = "", ...children) {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  element.append(...children);
  return element;
}

/**
 * Gives `parent` one child for each of `items`. `create` makes a child, `update(child, item, at)`
 * fills it.
 */
export function each(parent, items, create, update) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  while (parent.children.length < items.length) parent.append(create());
  items.forEach((item, at) => update(parent.children[at], item, at));
}

/**
 * Fills a table. Each row is `{cells, slow, failed}`. The first cell of a row is its heading. Each
 * cell is a text, or `{number}` for a number as text, with `share` for a bar; `{button, rank}` for a
 * button about a rank; or `{brief, more}` for a text that opens a longer one.
 */
export function fillTable(table, { caption, heads, rows, none }) {
  if (!table.tHead) {
    table.append(make("caption"));
    table.createTHead().insertRow();
    table.createTBody();
  }
  setText(table.caption, rows.length ? caption ?? "" : none);
  table.caption.hidden = !table.caption.textContent;
  table.tHead.hidden = !rows.length;
  const head = () => {
    const cell = make("th");
    cell.scope = "col";
    return cell;
  };
  each(table.tHead.rows[0], heads, head, setText);
  each(table.tBodies[0], rows, () => make("tr"), (row, { cells, slow, failed }) => {
    row.className = failed ? "failed" : slow ? "slow" : "";
    fillRow(row, cells);
  });
}

function fillRow(row, cells) {
  const create = () => {
    const cell = make(row.children.length ? "td" : "th");
    if (cell.tagName === "TH") cell.scope = "row";
    return cell;
  };
  each(row, cells, create, (cell, content) => {
    const { number, share, button, rank, brief, more } = typeof content === "string" ? {} : content;
    if (button !== undefined) return fillButton(cell, button, rank);
    if (brief !== undefined) return fillDetails(cell, brief, more);
    setText(cell, number ?? content);
    if (cell.tagName === "TD") {
      cell.className = number === undefined ? "" : share === undefined ? "number" : "heat";
    }
    if (share !== undefined) cell.style.setProperty("--share", share.toFixed(3));
  });
}

function fillButton(cell, text, rank) {
  if (!cell.firstElementChild) {
    cell.replaceChildren(make("button"));
    cell.firstElementChild.type = "button";
  }
  setText(cell.firstElementChild, text);
  cell.firstElementChild.dataset.rank = rank;
}

function fillDetails(cell, brief, more) {
  if (!cell.firstElementChild) {
    cell.replaceChildren(make("details", "", make("summary"), make("p")));
  }
  const [summary, text] = cell.firstElementChild.children;
  setText(summary, brief);
  setText(text, more);
}
