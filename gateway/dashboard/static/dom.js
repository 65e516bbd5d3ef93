// Building elements. Everything that comes from the network goes in as text, never as HTML.

/** Return a new element; `attributes` may hold `class`, `text`, dataset entries (`data-…`) and any attribute. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  assign(made, attributes);
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** Return a new SVG element. */
export function svg(tag, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  assign(made, attributes);
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Set the text of `node` only when it differs, so that nothing is laid out or read out again for nothing. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Make `parent` hold one child for each item, in order; `make` builds one for a new key, `update` fills it. */
export function keyed(parent, items, keyOf, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, index) => {
    const key = String(keyOf(item));
    let child = old.get(key);
    if (child === undefined) {
      child = make(item);
      child.dataset.key = key;
    }
    old.delete(key);
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
    update(child, item);
  });
  for (const child of old.values()) child.remove();
}

function assign(made, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") made.textContent = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
}
