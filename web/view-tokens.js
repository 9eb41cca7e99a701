// The tokens of the API: only root sees and changes them, over the socket of the daemon's host.

import { act, buttons, choice, field } from "./actions.js";
import { get } from "./api.js";
import { dialog, h, setText } from "./dom.js";
import { ago, moment } from "./format.js";
import { Kept, matches, section } from "./parts.js";
import { want } from "./store.js";
import { Table } from "./table.js";

const PERIOD = 10000;

export function tokens() {
  want(null);
  let [all, readAt] = [[], 0];
  const why = h("p", { class: "dim", hidden: true });
  const buttonOf = new Kept((key) => {
    const revoke = async () => {
      const token = all.find((one) => one.uuid === key);
      const content = h("p", {}, "Connections that use the token are closed at once. This cannot be undone.");
      if (!(await dialog(`Revoke '${token.name}'`, content, buttons("Revoke", "danger")))) return;
      await act(`Revoke '${token.name}'`, "DELETE", `/tokens/${key}`);
      await read();
    };
    return h("button", { type: "button", onclick: revoke }, "Revoke");
  });
  const columns = [
    { title: "Token", grow: true, text: (token) => token.name },
    { title: "Role", text: (token) => (token.tag ? `${token.role} of '${token.tag}'` : token.role) },
    { title: "", width: 80, text: (token) => buttonOf.of(token.key) },
    { title: "Expires", rank: 1, text: (token) => (token.expires ? moment(token.expires) : "never") },
    { title: "Created", rank: 2, text: (token) => `${ago(token.created)} ago` },
  ];
  const table = new Table("Tokens", columns, { empty: "No tokens" });
  const draw = () =>
    table.set(all.filter((one) => matches(one.name, one.role, one.tag)).map((one) => ({ ...one, key: one.uuid })));
  async function read() {
    readAt = Date.now();
    try {
      all = await get("/tokens");
      why.hidden = true;
    } catch (problem) {
      all = [];
      why.hidden = false;
      setText(why, `${problem.message}. ${problem.advice}`);
    }
    create.disabled = !why.hidden;
    table.element.hidden = !why.hidden;
    draw();
  }
  const create = h(
    "button",
    {
      type: "button",
      class: "primary",
      onclick: async () => {
        await createToken();
        await read();
      },
    },
    "Create a token",
  );
  return {
    element: h(
      "div",
      {},
      h("div", { class: "title" }, h("h1", {}, "Tokens"), create),
      section("Tokens of the API", why, table.element),
    ),
    table,
    draw() {
      if (Date.now() - readAt > PERIOD) read();
      else draw();
    },
  };
}

async function createToken() {
  const name = field("Name: what it is for", { name: "name", required: true, maxlength: 128 });
  const role = choice("Role", [
    { value: "reader", text: "reader: reads everything" },
    { value: "operator", text: "operator: operates objects with a tag" },
    { value: "admin", text: "admin: may do all" },
  ]);
  const tag = field("Tag of the operator's objects", { name: "tag", disabled: true, required: true });
  role.input.addEventListener("change", () => {
    tag.input.disabled = role.input.value !== "operator";
  });
  const days = field("Days until it expires (empty: never)", { name: "days", type: "number", min: 1, max: 3650 });
  const content = h("div", {}, name.element, h("div", { class: "pair" }, role.element, tag.element), days.element);
  if (!(await dialog("Create a token", content, buttons("Create the token")))) return;
  const wanted = { name: name.input.value.trim(), role: role.input.value };
  if (wanted.role === "operator") wanted.tag = tag.input.value.trim();
  if (days.input.value) wanted.expires = new Date(Date.now() + Number(days.input.value) * 86400e3).toISOString();
  const made = await act(`Token '${wanted.name}'`, "POST", "/tokens", wanted);
  if (!made?.secret) return;
  const secret = h("p", {}, h("code", {}, made.secret));
  await dialog(
    `Token '${wanted.name}'`,
    h("div", {}, h("p", {}, "Copy the secret now. It is not shown again."), secret),
    [{ label: "Done", value: "do", kind: "primary" }],
  );
}
