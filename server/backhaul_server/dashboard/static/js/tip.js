// The tooltip of the page, for canvases. Its text is also available by keyboard, next to the canvas.

import { byId, setText } from "./dom.js";

export function showTip(event, text) {
  const tip = byId("tip");
  setText(tip, text);
  tip.hidden = false;
  const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const y = event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 12 : event.clientY + 18;
  tip.style.transform = `translate(${Math.max(8, x)}px, ${Math.max(8, y)}px)`;
}

export function hideTip() {
  byId("tip").hidden = true;
}
