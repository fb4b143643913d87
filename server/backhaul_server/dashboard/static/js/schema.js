// Describes JSON Schemas of OpenAPI in words and by examples.

const NUMBERS = { at_s: 1790000000, bytes: 67108864, ms: 12.5, s: 4.2 };
const DEEPEST = 4;

/** Returns the schema that a reference points to, or the schema itself if it is no reference. */
export function resolve(document, schema) {
  if (schema?.$ref === undefined) return schema ?? {};
  return schema.$ref
    .slice(2)
    .split("/")
    .reduce((node, key) => node[key], document);
}

/** Returns the name of the model of a schema or of its items, if there is one. */
function nameOf(schema) {
  return schema.$ref?.split("/").at(-1);
}

/** Describes a type in words: "integer", "list of Worker", "number or null". */
export function typeText(document, schema) {
  if (nameOf(schema)) return nameOf(schema);
  if (schema.anyOf) return schema.anyOf.map((one) => typeText(document, one)).join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${typeText(document, schema.items ?? {})}`;
  if (schema.type === "object" && schema.additionalProperties) return `${typeText(document, schema.additionalProperties)} by name`;
  return schema.type ?? "any";
}

/** Describes the limits of a value: "10 to 3,600", "at least 0", "up to 200 characters". */
export function boundsText(schema) {
  const parts = schema.anyOf ? schema.anyOf.find((one) => one.type !== "null") : schema;
  const { minimum, maximum, exclusiveMinimum, maxLength, pattern } = parts;
  const texts = [];
  if (minimum !== undefined && maximum !== undefined) texts.push(`${minimum.toLocaleString("en")} to ${maximum.toLocaleString("en")}`);
  else if (minimum !== undefined) texts.push(`at least ${minimum.toLocaleString("en")}`);
  else if (maximum !== undefined) texts.push(`at most ${maximum.toLocaleString("en")}`);
  if (exclusiveMinimum !== undefined) texts.push(`above ${exclusiveMinimum.toLocaleString("en")}`);
  if (maxLength !== undefined) texts.push(`up to ${maxLength} characters`);
  if (pattern !== undefined) texts.push(`matches ${pattern}`);
  return texts.join(", ");
}

/** Returns the models that a schema names, directly or through other models; each once, outermost first. */
export function modelsOf(document, schema, models = new Map()) {
  if (schema === undefined || schema === null || typeof schema !== "object") return models;
  const name = nameOf(schema);
  if (name) {
    if (models.has(name)) return models;
    const model = resolve(document, schema);
    models.set(name, model);
    Object.values(model.properties ?? {}).forEach((field) => modelsOf(document, field, models));
    return models;
  }
  for (const part of [schema.items, schema.additionalProperties, ...(schema.anyOf ?? [])]) modelsOf(document, part, models);
  return models;
}

/** Returns a value that the schema allows: one of its examples, if it has any. */
export function exampleOf(document, schema, name = "", depth = 0) {
  if (schema.example !== undefined) return schema.example;
  if (schema.examples?.length) return schema.examples[0];
  const model = resolve(document, schema);
  if (model !== schema) return depth > DEEPEST ? {} : exampleOf(document, model, name, depth + 1);
  if (schema.anyOf) return exampleOf(document, schema.anyOf[0], name, depth);
  if (schema.enum) return schema.enum[0];
  if (schema.const !== undefined) return schema.const;
  if (schema.type === "array") return [exampleOf(document, schema.items ?? {}, name, depth)];
  if (schema.type === "object") {
    return Object.fromEntries(Object.entries(schema.properties ?? {}).map(([key, field]) => [key, exampleOf(document, field, key, depth)]));
  }
  if (schema.type === "integer" || schema.type === "number") {
    const unit = Object.keys(NUMBERS).find((suffix) => name.endsWith(`_${suffix}`) || name === suffix);
    const value = NUMBERS[unit] ?? 1;
    return schema.type === "integer" ? Math.round(value) : value;
  }
  return schema.type === "boolean" ? false : schema.type === "string" ? "" : null;
}
