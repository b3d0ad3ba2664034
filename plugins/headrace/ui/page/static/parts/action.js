/** A button that changes something, and its dialog: it shows what the API says will happen before it is done. */

import { ApiError, get, post, withQuery } from "../core/api.js";
import { announce } from "../core/announce.js";
import { html, useEffect, useId, useRef, useState } from "../core/html.js";
import { Words } from "./words.js";

/**
 * @typedef {object} Field  what the person gives besides
 * @property {string} name      the field of the request
 * @property {string} label
 * @property {string[]} [choices]
 * @property {boolean} [required]
 */

/**
 * @param {{
 *   label: string, title: string, path: string, done: () => void, permitted: boolean, notPermitted?: string,
 *   fields?: Field[], danger?: boolean, primary?: boolean,
 * }} props
 *   label: the button's; title: the dialog's; path: the API's, whose words come from `path/preview`
 */
export function Action({ label, title, path, done, permitted, notPermitted, fields = [], danger = false, primary = false }) {
  const [open, setOpen] = useState(false);
  const why = useId();
  const kind = danger ? "danger" : primary ? "primary" : undefined;
  if (!permitted) {
    const text = notPermitted ?? "You may look, but not act: this needs the right to edit the stream's batch DAG in Airflow.";
    return html`<span class="action">
      <button type="button" class=${kind} aria-disabled="true" aria-describedby=${why} title=${text}>${label}</button>
      <span id=${why} class="visually-hidden">${text}</span>
    </span>`;
  }
  return html`<span class="action">
    <button type="button" class=${kind} onClick=${() => setOpen(true)}>${label}</button>
    ${open ? html`<${Confirmation} ...${{ label, title, path, fields, danger }} close=${() => setOpen(false)}
        finished=${(words) => { setOpen(false); announce(words); done(); }} />` : null}
  </span>`;
}

/**
 * @param {{label: string, title: string, path: string, fields: Field[], danger: boolean, close: () => void, finished: (words: string) => void}} props
 */
function Confirmation({ label, title, path, fields, danger, close, finished }) {
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const name = useId(), words = useId();
  const [given, setGiven] = useState(() => Object.fromEntries(fields.map((each) => [each.name, each.choices?.[0] ?? ""])));
  const [preview, setPreview] = useState(/** @type {any} */ (null));
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  // Choices change what will happen; a reason does not.
  const asked = JSON.stringify(fields.filter((each) => each.choices).map((each) => [each.name, given[each.name]]));

  useEffect(() => { dialog.current.showModal(); }, []);
  useEffect(() => {
    let ended = false;
    get(withQuery(`${path}/preview`, Object.fromEntries(JSON.parse(asked)))).then(
      (answer) => { if (!ended) setPreview(answer); },
      (problem) => { if (!ended) setError(problem.message); },
    );
    return () => { ended = true; };
  }, [path, asked]);

  async function act(event) {
    event.preventDefault();
    setBusy(true);
    setError("");
    try {
      finished((await post(path, given)).done);
    } catch (problem) {
      setError(problem instanceof ApiError && problem.status === 401 ? "You are signed out: sign in again in Airflow." : String(problem.message));
      setBusy(false);
    }
  }
  const missing = fields.some((each) => each.required && !given[each.name].trim());
  return html`<dialog ref=${dialog} aria-labelledby=${name} aria-describedby=${words} onClose=${close}>
    <form onSubmit=${act}>
      <h2 id=${name}>${title}</h2>
      <div id=${words} class="will">
        ${preview ? (preview.refused ? html`<p class="refused"><strong>Not possible now.</strong> <${Words} text=${preview.refused} /></p>` : html`<p><${Words} text=${preview.will} /></p>`)
          : error ? null : html`<p class="quiet">Asking what will happen …</p>`}
      </div>
      ${fields.map((each) => html`<${Input} key=${each.name} field=${each} value=${given[each.name]}
          change=${(value) => setGiven((old) => ({ ...old, [each.name]: value }))} />`)}
      ${error ? html`<p class="refused" role="alert">${error}</p>` : null}
      <div class="buttons">
        <button type="button" onClick=${() => dialog.current.close()}>Cancel</button>
        <button type="submit" class=${danger ? "danger" : "primary"} disabled=${!preview || preview.refused || missing || busy}>${busy ? "Working …" : label}</button>
      </div>
    </form>
  </dialog>`;
}

/** @param {{field: Field, value: string, change: (value: string) => void}} props */
function Input({ field, value, change }) {
  const follow = (event) => change(event.currentTarget.value);
  return html`<label class="field">
    <span>${field.label}${field.required ? " (required)" : ""}</span>
    ${field.choices
      ? html`<select value=${value} onChange=${follow}>${field.choices.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}</select>`
      : html`<textarea rows="2" value=${value} required=${field.required} onInput=${follow}></textarea>`}
  </label>`;
}
