// Whether JSON obeys a schema: the keywords people use. The server's grammar has made it so; this shows that it has.

const typeOf = (value) => (value === null ? "null" : Array.isArray(value) ? "array" : typeof value);

const isType = (value, type) => (type === "integer" ? Number.isInteger(value) : typeOf(value) === type);

const isSame = (a, b) => JSON.stringify(a) === JSON.stringify(b);

/** What is wrong with a value, as a sentence; null if nothing is. */
export function objection(value, schema, root = schema, place = "The answer") {
  if (schema === true || schema === undefined) return null;
  if (schema === false) return `${place} may not be there.`;
  const below = (part, sub, name) => objection(part, sub, root, name);
  if (schema.$ref) {
    const target = schema.$ref.split("/").slice(1).reduce((node, name) => node?.[name], root);
    return target ? below(value, target, place) : null;
  }
  const types = schema.type === undefined ? [] : [schema.type].flat();
  if (types.length && !types.some((type) => isType(value, type))) return `${place} is no ${types.join(" or ")}.`;
  if (schema.enum && !schema.enum.some((one) => isSame(one, value))) return `${place} is none of the values it may have.`;
  if ("const" in schema && !isSame(schema.const, value)) return `${place} is not ${JSON.stringify(schema.const)}.`;
  for (const one of ["anyOf", "oneOf"]) {
    if (schema[one] && schema[one].every((sub) => below(value, sub, place))) return `${place} matches none of its forms.`;
  }
  for (const sub of schema.allOf ?? []) {
    const fault = below(value, sub, place);
    if (fault) return fault;
  }
  const check = { object: ofObject, array: ofArray, string: ofString, number: ofNumber }[typeOf(value)];
  return check ? check(value, schema, place, below) : null;
}

function ofObject(value, schema, place, below) {
  const missing = (schema.required ?? []).find((name) => !Object.hasOwn(value, name));
  if (missing !== undefined) return `${place} lacks ${JSON.stringify(missing)}.`;
  for (const [name, part] of Object.entries(value)) {
    const known = Object.hasOwn(schema.properties ?? {}, name);
    const fault = below(part, known ? schema.properties[name] : schema.additionalProperties, JSON.stringify(name));
    if (fault && !(schema.patternProperties && !known)) return fault;
  }
  return null;
}

function ofArray(value, schema, place, below) {
  if (value.length < (schema.minItems ?? 0)) return `${place} has fewer than ${schema.minItems} items.`;
  if (value.length > (schema.maxItems ?? Infinity)) return `${place} has more than ${schema.maxItems} items.`;
  const first = schema.prefixItems ?? [];
  for (const [i, part] of value.entries()) {
    const fault = below(part, i < first.length ? first[i] : schema.items, `${place}[${i}]`);
    if (fault) return fault;
  }
  return null;
}

function ofString(value, schema, place) {
  const length = [...value].length;
  if (length < (schema.minLength ?? 0)) return `${place} is shorter than ${schema.minLength} characters.`;
  if (length > (schema.maxLength ?? Infinity)) return `${place} is longer than ${schema.maxLength} characters.`;
  if (schema.pattern && !new RegExp(schema.pattern, "u").test(value)) return `${place} does not match ${schema.pattern}.`;
  return null;
}

function ofNumber(value, schema, place) {
  if (value < schema.minimum || value <= schema.exclusiveMinimum) return `${place} is too small.`;
  if (value > schema.maximum || value >= schema.exclusiveMaximum) return `${place} is too large.`;
  if (schema.multipleOf && !Number.isInteger(value / schema.multipleOf)) return `${place} is no multiple of ${schema.multipleOf}.`;
  return null;
}
