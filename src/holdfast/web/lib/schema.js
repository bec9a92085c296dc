// Reading JSON Schema as far as forms need it.

export function resolve(schema, root) {
  let found = schema ?? {};
  for (let depth = 0; found.$ref && depth < 20; depth += 1) {
    const path = found.$ref.replace(/^#\//, "").split("/");
    const target = path.reduce((at, part) => at?.[part.replaceAll("~1", "/").replaceAll("~0", "~")], root);
    found = { ...target, ...without(found, "$ref") };
  }
  return found;
}

function without(object, key) {
  const { [key]: _, ...rest } = object;
  return rest;
}

// What a schema asks for: one word, by which a field is chosen. "json" is whatever has no field of its own.
export function kindOf(schema, root) {
  const found = resolve(schema, root);
  if (found.const !== undefined) return "const";
  if (Array.isArray(found.enum)) return "choice";
  if (Array.isArray(found.anyOf)) return isNullable(found, root) && found.anyOf.length === 2 ? "optional" : "json";
  if (found.type === "array") return found.prefixItems || isNested(found.items, root) ? "json" : "list";
  if (found.type === "object") return found.properties ? "object" : "json";
  return ["string", "integer", "number", "boolean", "null"].includes(found.type) ? found.type : "json";
}

export function isNullable(schema, root) {
  return (schema.anyOf ?? []).some((each) => resolve(each, root).type === "null");
}

export function whenGiven(schema, root) {
  return schema.anyOf.find((each) => resolve(each, root).type !== "null");
}

function isNested(items, root) {
  return !["string", "integer", "number", "choice"].includes(kindOf(items ?? {}, root));
}

export function isEmptyObject(schema, root) {
  const found = resolve(schema, root);
  return kindOf(found, root) === "object" && Object.keys(found.properties).length === 0;
}

export function titleOf(name, schema) {
  const words = String(schema.title && schema.title !== name ? schema.title : name)
    .replaceAll(/[_-]+/g, " ")
    .trim();
  return words.charAt(0).toUpperCase() + words.slice(1);
}

export function inputType(schema) {
  return { "date-time": "datetime-local", date: "date", email: "email", uri: "url" }[schema.format] ?? "text";
}
