// Shows /api/v1/openapi.json: every route with its parameters, its answer and an example.

import { byId, element, setText } from "./dom.js";
import { boundsText, exampleOf, modelsOf, resolve, typeText } from "./schema.js";

const ORDER = ["live", "overview", "memory", "latency", "timeline", "segments", "workers", "sessions", "alerts", "runs"];

function table(caption, titles, rows, label = caption) {
  return element(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    element(
      "table",
      {},
      element("caption", {}, caption),
      element("thead", {}, element("tr", {}, ...titles.map((title) => element("th", { scope: "col", class: "text" }, title)))),
      element("tbody", {}, ...rows.map((cells) => element("tr", {}, ...cells.map((cell, i) => element("td", { class: i === cells.length - 1 ? "text wrap" : "text" }, cell))))),
    ),
  );
}

function code(text) {
  return element("code", { class: "mono" }, text);
}

function parameters(document_, path, list) {
  return table(
    "Parameters",
    ["Name", "Type", "Default", "Bounds", "Meaning"],
    list.map((parameter) => {
      const schema = resolve(document_, parameter.schema);
      const standard = parameter.required ? "required" : schema.default === undefined || schema.default === null || schema.default === "" ? "none" : JSON.stringify(schema.default);
      return [code(parameter.name), typeText(document_, schema), standard, boundsText(schema) || "–", parameter.description ?? schema.description ?? "–"];
    }),
    `Parameters of ${path}`,
  );
}

function model(document_, name, schema) {
  if (!schema.properties) return element("div", {}, element("h4", {}, name), element("p", { class: "hint" }, typeText(document_, schema)));
  const rows = Object.entries(schema.properties).map(([field, one]) => [code(field), typeText(document_, one), one.description ?? resolve(document_, one).description ?? "–"]);
  return table(schema.description ? `${name}: ${schema.description}` : name, ["Field", "Type", "Meaning"], rows);
}

function answer(document_, operation) {
  const content = Object.entries(operation.responses["200"]?.content ?? {});
  if (content.length === 0) return [];
  const [type, body] = content[0];
  // The schema of server-sent events describes the data of one event.
  const schema = body.schema ?? body.itemSchema ?? {};
  const parts = [element("p", {}, "Answers ", code(type), schema.$ref || schema.items ? `: ${typeText(document_, schema)}` : "")];
  const models = [...modelsOf(document_, schema)];
  if (models.length > 0) parts.push(element("details", {}, element("summary", {}, "Fields"), ...models.map(([name, one]) => model(document_, name, one))));
  if (type.includes("json")) {
    const example = body.example ?? Object.values(body.examples ?? {})[0]?.value ?? exampleOf(document_, schema);
    parts.push(element("details", {}, element("summary", {}, "Example"), element("pre", { class: "mono", tabindex: "0" }, JSON.stringify(example, null, 2))));
  }
  return parts;
}

function route(document_, path, operation) {
  const id = path.slice(1).replaceAll(/[^a-z0-9]+/gi, "-").replace(/-$/, "");
  const title = path.includes("{") ? code(path) : element("a", { href: path.slice(1) }, code(path));
  const lead = operation.description ?? operation.summary ?? "";
  const list = operation.parameters ?? [];
  return {
    id,
    path,
    section: element(
      "section",
      { class: "card", id, "aria-labelledby": `${id}-title` },
      element("h2", { id: `${id}-title` }, element("span", { class: "badge", "data-kind": "gradients" }, "GET"), " ", title),
      element("p", { class: "lead" }, lead),
      ...(list.length ? [parameters(document_, path, list)] : []),
      ...answer(document_, operation),
    ),
  };
}

function rank(path) {
  const position = ORDER.indexOf(path.split("/")[3]?.split(".")[0]);
  return position < 0 ? ORDER.length : position;
}

async function draw() {
  const answered = await fetch("api/v1/openapi.json");
  if (!answered.ok) {
    setText(byId("about"), `/api/v1/openapi.json answers ${answered.status}. Is the dashboard up, and are you logged in?`);
    return;
  }
  const document_ = await answered.json();
  setText(byId("version"), `version ${document_.info.version}`);
  setText(byId("about"), `${document_.info.description ?? ""} All routes are read-only. The machine-readable form is at `.trimStart());
  byId("about").append(element("a", { href: "api/v1/openapi.json" }, "/api/v1/openapi.json"), ".");
  const routes = Object.entries(document_.paths)
    .filter(([, methods]) => methods.get)
    .sort(([a], [b]) => rank(a) - rank(b) || a.localeCompare(b))
    .map(([path, methods]) => route(document_, path, methods.get));
  byId("index").replaceChildren(...routes.map(({ id, path }) => element("a", { href: `#${id}` }, path.replace("/api/v1", ""))));
  byId("routes").append(...routes.map(({ section }) => section));
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

draw();
