// A button at each figure that copies it as an image, with its title, legend and time range; where the clipboard is
// refused, as it is without TLS, the image is downloaded.

import { colour } from "./colour.js";
import { element, icon, setText, speak } from "./dom.js";
import { rangeTimes } from "./range.js";

const FONT = "vendor/inter/inter-latin-wght-normal.woff2";
const PAD = 16; // pixels around the figure
const SHOWN_MS = 2000;

/** Adds the button to a figure that has a figcaption. */
export function addCopyButton(figure) {
  const title = () => figure.querySelector("figcaption").textContent;
  const text = element("span", { class: "copy-text" });
  const times = element("span", { class: "pictured-times" });
  const button = element("button", { type: "button", class: "copy quiet", title: "Copy as an image" }, icon("copy"), text);
  button.setAttribute("aria-label", `Copy as an image: ${title()}`);
  button.addEventListener("click", async () => {
    setText(times, figure.dataset.scope ?? rangeTimes());
    const outcome = await deliver(await pictureOf(figure), `backhaul-${title()}`);
    setText(text, outcome);
    speak(`${title()}: ${outcome}`);
    setTimeout(() => setText(text, ""), SHOWN_MS);
  });
  figure.append(button, times);
}

/** Copies an image, or downloads it under a name. Returns what was done, in a word. */
async function deliver(blob, name) {
  try {
    await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
    return "Copied";
  } catch {
    const link = element("a", { download: `${name.replace(/[^\w]+/g, "-").slice(0, 80)}.png`, href: URL.createObjectURL(blob) });
    link.click();
    URL.revokeObjectURL(link.href);
    return "Downloaded";
  }
}

/** Returns the style sheet of the page with its font in it, for an image, which can load nothing. */
async function styleWithFont() {
  const [style, font] = await Promise.all(["static/style.css", `static/${FONT}`].map((path) => fetch(path)));
  const bytes = new Uint8Array(await font.arrayBuffer());
  return (await style.text()).replace(FONT, `data:font/woff2;base64,${btoa(String.fromCharCode(...bytes))}`);
}

/** Returns an image of a figure as it is on the page, as sharp as there, with the time range in place of the button. */
async function pictureOf(figure) {
  await import("../vendor/html_to_image/html-to-image.js"); // few viewers need it
  // Without it the library would look for fonts in a way that the page's policy forbids, and leave drawings unstyled.
  const fontEmbedCSS = await styleWithFont();
  figure.classList.add("is-pictured");
  const [width, height] = [figure.offsetWidth, figure.offsetHeight].map((pixels) => pixels + 2 * PAD);
  const style = { margin: "0", border: "none", padding: `${PAD}px` };
  try {
    return await htmlToImage.toBlob(figure, { width, height, style, fontEmbedCSS, backgroundColor: colour("card"), pixelRatio: Math.max(1, devicePixelRatio) });
  } finally {
    figure.classList.remove("is-pictured");
  }
}
