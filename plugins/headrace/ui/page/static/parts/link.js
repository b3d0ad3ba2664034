/** Links: within the page, and out of it. */

import { followOutside } from "../core/airflow_frame.js";
import { html } from "../core/html.js";
import { href } from "../core/router.js";

/** @param {{to: string[], query?: Record<string, any>, current?: boolean, children: any}} props */
export function Link({ to, query, current = false, children, ...rest }) {
  return html`<a href=${href(to, query)} aria-current=${current ? "page" : undefined} ...${rest}>${children}</a>`;
}

/** A link to Airflow, to Spark's page or elsewhere; only http(s) is linked. @param {{url: string | null, children: any}} props */
export function OutsideLink({ url, children }) {
  if (!url) return null;
  const target = new URL(url, document.baseURI);
  if (!["http:", "https:"].includes(target.protocol)) return html`<span>${children}: <code>${url}</code></span>`;
  return html`<a href=${target.href} target=${target.origin === location.origin ? "_top" : "_blank"} rel="noopener" onClick=${followOutside}>${children}</a>`;
}
