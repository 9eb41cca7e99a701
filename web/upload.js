// Imports a file of the person who looks at the page: it is sent in pieces, and the disk is created from it.

import { act, attach, buttons, choice, field } from "./actions.js";
import { change, get, post } from "./api.js";
import { nameField, srChoice } from "./create.js";
import { dialog, h, note, noteProblem, setText } from "./dom.js";
import { bytes, duration } from "./format.js";

const PIECE = 8 * 1024 ** 2;
/** So often in succession a piece is sent again when the connection is lost, after so many milliseconds. */
const ATTEMPTS = 30;
const PAUSE = 2000;

const FORMATS = ["qcow2", "vmdk", "vhd", "vhdx", "raw"];

/** The format that a file's name speaks of. */
function formatOf(name) {
  const end = name.toLowerCase().split(".").pop();
  return { img: "raw", iso: "raw", qcow: "qcow2", vpc: "vhd" }[end] ?? (FORMATS.includes(end) ? end : null);
}

/** Imports a file as a disk, into a repository if one is given, and attaches it to a VM if one is given. */
export async function importDisk(sr, vm) {
  const where = srChoice(sr);
  if (!where) return;
  const file = field("Image file on this computer", { name: "file", type: "file", required: true });
  const name = nameField();
  const format = choice("Format of the file", [
    { value: "", text: "Choose…" },
    ...FORMATS.map((format) => ({ value: format, text: format })),
  ]);
  format.input.required = true;
  file.input.addEventListener("change", () => {
    const chosen = file.input.files[0];
    if (!chosen) return;
    if (!name.input.value) name.input.value = chosen.name.replace(/\.[^.]*$/, "").slice(0, 128);
    format.input.value = formatOf(chosen.name) ?? "";
  });
  const content = h(
    "div",
    {},
    h("p", {}, "The file is sent to the host and converted. It must not have a backing file or be compressed."),
    file.element,
    name.element,
    h("div", { class: "pair" }, format.element, where.element),
  );
  const title = vm ? `Import a disk for '${vm.name}'` : "Import a disk";
  if (!(await dialog(title, content, buttons("Import the disk")))) return;
  const wanted = { sr: where.input.value, name: name.input.value.trim(), source_format: format.input.value };
  const upload = await send(file.input.files[0], wanted);
  if (!upload) return;
  const task = await act(`Disk '${wanted.name}'`, "POST", "/vdis/import", { ...wanted, upload });
  // What was sent of no use would take space for an hour.
  if (!task) change("DELETE", `/uploads/${upload}`).catch(() => {});
  if (task && vm) await attach(vm, task.result.uuid, wanted.name);
}

/** Sends a file, and shows how far it is; returns the upload, or `null` when it has failed or was cancelled. */
async function send(file, { sr, name }) {
  const title = `Upload of '${file.name}'`;
  const cancelled = new AbortController();
  const shown = progress(title, file.size, () => cancelled.abort());
  const stay = (event) => event.preventDefault();
  addEventListener("beforeunload", stay);
  let upload = null;
  try {
    upload = await change("POST", "/uploads", { sr, name: file.name.slice(0, 128) || name, size: file.size });
    while (upload.received < file.size) {
      upload = await sendPiece(upload, file, cancelled.signal);
      shown.set(upload.received);
    }
    return upload.uuid;
  } catch (problem) {
    if (upload) change("DELETE", `/uploads/${upload.uuid}`).catch(() => {});
    if (cancelled.signal.aborted) note("", `${title}: cancelled`);
    else noteProblem(`${title}: not done`, problem);
    return null;
  } finally {
    removeEventListener("beforeunload", stay);
    shown.remove();
  }
}

/** Sends the next piece; when its answer is lost, continues where the daemon says. */
async function sendPiece(upload, file, signal) {
  const path = `/uploads/${upload.uuid}`;
  for (let attempt = 1; ; attempt += 1) {
    try {
      if (attempt > 1) {
        const now = await get(path, { signal });
        if (now.received > upload.received) return now;
      }
      const piece = file.slice(upload.received, upload.received + PIECE);
      return await post(`${path}/append?offset=${upload.received}`, piece, signal);
    } catch (problem) {
      const isPassing = problem.status === 0 || ["busy", "timeout", "overloaded"].includes(problem.code);
      if (signal.aborted || !isPassing || attempt === ATTEMPTS) throw problem;
      await new Promise((resolve) => setTimeout(resolve, PAUSE));
    }
  }
}

/** Says how much of a file was sent, at which rate, and how long the rest will take. */
function progress(title, size, cancel) {
  const bar = h("progress", { max: size, value: 0, "aria-label": title });
  const text = h("p", {}, `0 of ${bytes(size)}`);
  const button = h("button", { type: "button", onclick: cancel }, "Cancel the upload");
  const element = note("working", title);
  element.firstChild.append(bar, text, button);
  element.lastChild.remove();
  const begun = performance.now();
  return {
    set(sent) {
      const seconds = (performance.now() - begun) / 1000;
      const rate = sent / Math.max(seconds, 0.001);
      bar.value = sent;
      setText(text, `${bytes(sent)} of ${bytes(size)}, ${bytes(rate)}/s, ${duration(((size - sent) / rate) * 1e9)} left`);
    },
    remove: () => element.remove(),
  };
}
