/** The one door to the vendored template and hook functions. Texts given to `html` become text nodes, never markup. */

import htm from "../vendor/htm/htm.module.js";
import { Fragment, h, render } from "../vendor/preact/preact.module.js";
import { useCallback, useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "../vendor/preact/hooks.module.js";

const html = htm.bind(h);

export { Fragment, html, render, useCallback, useEffect, useId, useLayoutEffect, useMemo, useRef, useState };
