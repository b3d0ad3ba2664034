/** Short messages that a screen reader reads out: what an action did, a change of a stream's state. */

import { html, useEffect, useState } from "./html.js";

/** @param {string} text */
export function announce(text) {
  dispatchEvent(new CustomEvent("announce", { detail: text }));
}

/** The place of the messages, visible too; one at a time. */
export function Announcements() {
  const [text, setText] = useState("");
  useEffect(() => {
    let timer = 0;
    const show = (event) => {
      setText(event.detail);
      clearTimeout(timer);
      timer = setTimeout(() => setText(""), 10_000);
    };
    addEventListener("announce", show);
    return () => { clearTimeout(timer); removeEventListener("announce", show); };
  }, []);
  return html`<div class="announcement" role="status" aria-live="polite">${text ? html`<span>${text}</span>` : null}</div>`;
}
