// The screen of a VM by VNC in the page, with noVNC. It is connected when the user opens it, and closed with the view.

import { token } from "./api.js";
import { h, setText } from "./dom.js";

/** The subprotocols of the WebSocket: the daemon's, and the token where there is one, for which browsers have no header. */
function protocols() {
  const secret = token.get();
  return secret ? ["tapline.screen", `tapline.token.${secret}`] : ["tapline.screen"];
}

/** A section with the screen of the VM that `vm()` returns. */
export function screen(vm) {
  let rfb = null;
  const box = h("div", { class: "screen", hidden: true });
  const text = h("p", { class: "dim" }, "The screen is not open.");
  const button = (label, onclick) => h("button", { type: "button", onclick }, label);
  const open = button("Open", () => connect());
  const close = button("Close", () => rfb?.disconnect());
  const keys = button("Ctrl+Alt+Del", () => rfb?.sendCtrlAltDel());
  const full = button("Full screen", () => box.requestFullscreen());
  const show = (isOpen, words) => {
    box.hidden = !isOpen;
    open.hidden = isOpen;
    for (const one of [close, keys, full]) one.hidden = !isOpen;
    setText(text, words);
  };

  async function connect() {
    show(true, "Connecting…");
    try {
      const { default: Rfb } = await import("./novnc/core/rfb.js");
      const address = new URL(`/v1/vms/${vm().uuid}/screen`, location.href);
      address.protocol = location.protocol === "https:" ? "wss:" : "ws:";
      rfb = new Rfb(box, address.href, { wsProtocols: protocols() });
    } catch (error) {
      show(false, `The screen cannot be opened: ${error.message}`);
      return;
    }
    rfb.scaleViewport = true;
    rfb.addEventListener("connect", () => {
      setText(text, "Click the screen to type. Esc is sent to the guest.");
      rfb?.focus();
    });
    rfb.addEventListener("disconnect", ({ detail }) => {
      rfb = null;
      box.replaceChildren();
      show(
        false,
        detail.clean
          ? "The screen is not open."
          : "The screen was closed: the VM has no screen, was shut down, or " + "you may not operate it.",
      );
    });
  }

  show(false, "The screen is not open.");
  const head = h("div", { class: "head" }, h("h2", {}, "Screen"), h("span", { class: "bar" }, open, keys, full, close));
  return {
    element: h("section", { "aria-label": "Screen" }, head, box, text),
    destroy() {
      rfb?.disconnect();
    },
  };
}
