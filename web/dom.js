// Elements. All text is set as text, never as HTML: names come from users.

/** An element with attributes, listeners (`onclick`) and children; texts among the children are text. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Sets the text of an element if it is another one. */
export function setText(element, text) {
  const string = String(text);
  if (element.textContent !== string) element.textContent = string;
}

/** Sets an attribute if it is another one; `null` removes it. */
export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, String(value));
  }
}

/** A list of names and values, of which only the values that change are written: `set({ name: value })`. */
export function facts() {
  const element = h("dl", { class: "facts" });
  const values = new Map();
  return {
    element,
    set(pairs) {
      for (const [name, value] of Object.entries(pairs)) {
        if (!values.has(name)) {
          const dd = h("dd");
          values.set(name, dd);
          element.append(h("div", {}, h("dt", {}, name), dd));
        }
        const dd = values.get(name);
        dd.parentElement.hidden = value === null || value === undefined || value === "";
        if (value instanceof Node) {
          if (dd.firstChild !== value) dd.replaceChildren(value);
        } else {
          setText(dd, value ?? "");
        }
      }
    },
  };
}

/** A dialog with buttons; resolves with the value of the button, or `null` when it is left with Esc. */
export function dialog(title, content, buttons) {
  return new Promise((resolve) => {
    const heading = h("h2", { id: "dialog-title" }, title);
    const form = h("form", { method: "dialog" }, heading, content);
    const bar = h("div", { class: "bar" });
    for (const { label, value, kind } of buttons) {
      bar.append(
        h(
          "button",
          {
            type: value === null ? "button" : "submit",
            value: value ?? "",
            class: kind,
            onclick: value === null ? () => element.close("") : undefined,
          },
          label,
        ),
      );
    }
    form.append(bar);
    const element = h("dialog", { "aria-labelledby": "dialog-title" }, form);
    element.addEventListener("close", () => {
      element.remove();
      resolve(element.returnValue || null);
    });
    document.body.append(element);
    element.showModal();
  });
}

const notes = document.getElementById("notes");

/** Says something in the corner; good news leave by themselves, and work under way is removed when it has ended. */
export function note(kind, title, ...more) {
  const close = h("button", { type: "button", "aria-label": "Dismiss", onclick: () => element.remove() }, "×");
  const text = h(
    "div",
    {},
    h("p", {}, h("strong", {}, title)),
    more.filter(Boolean).map((line) => h("p", {}, line)),
  );
  const element = h("div", { class: `note ${kind}` }, text, close);
  notes.append(element);
  if (kind !== "bad" && kind !== "working") setTimeout(() => element.remove(), 8000);
  return element;
}

/** Says why something was not done. */
export function noteProblem(title, problem) {
  note("bad", title, problem.message, problem.advice && `What to do: ${problem.advice}`);
}
