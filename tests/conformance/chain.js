// The names of a prompt's blocks in another language: `node chain.js '{"tokens": [...], "keys": [[...]], "size": 16}'`.
const { createHash } = require("node:crypto");

function head(major, number) {
  const first = major << 5;
  if (number < 24) return Buffer.from([first | number]);
  if (number < 0x100) return Buffer.from([first | 24, number]);
  if (number < 0x10000) return Buffer.from([first | 25, number >> 8, number & 0xff]);
  const bytes = Buffer.alloc(5);
  bytes[0] = first | 26;
  bytes.writeUInt32BE(number, 1);
  return bytes;
}

function cbor(value) {
  if (value === null) return Buffer.from([0xf6]);
  if (Buffer.isBuffer(value)) return Buffer.concat([head(2, value.length), value]);
  if (Array.isArray(value)) return Buffer.concat([head(4, value.length), ...value.map(cbor)]);
  if (typeof value === "string") return Buffer.concat([head(3, Buffer.byteLength(value)), Buffer.from(value)]);
  return value < 0 ? head(1, -1 - value) : head(0, value);
}

const sha256 = (bytes) => createHash("sha256").update(bytes).digest();
const { tokens, keys, size } = JSON.parse(process.argv[2]);
let parent = sha256(cbor("vllm-none-hash"));
for (let index = 0; (index + 1) * size <= tokens.length; index++) {
  const told = keys[index] && keys[index].length ? keys[index] : null;
  parent = sha256(cbor([parent, tokens.slice(index * size, (index + 1) * size), told]));
  console.log(parent.toString("hex"));
}
