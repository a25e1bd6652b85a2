// A scripted session with the unmodified OpenAI client for Node.js; prints one JSON object that the test reads.
// usage: node session.mjs URL FOLDER-WITH-node_modules
import { createRequire } from "node:module";

const [, , url, folder] = process.argv;
const OpenAI = createRequire(`${folder}/`)("openai").default;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const ask = (script, more = {}) => ({
  model: "parrot", max_tokens: 250, messages: [{ role: "user", content: `SAY[${script}]YAS` }], ...more,
});
const tools = [{ type: "function", function: { name: "add", parameters: { type: "object", properties: {} } } }];
const found = {};

found.models = (await client.models.list()).data.map((model) => model.id);
found.chat = (await client.chat.completions.create(ask("hello"))).choices[0].message.content;
found.stream = "";
for await (const chunk of await client.chat.completions.create(ask("one two", { stream: true }))) {
  found.stream += chunk.choices[0]?.delta?.content ?? "";
}
const call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>';
const called = (await client.chat.completions.create(ask(call, { tools }))).choices[0];
found.call = [called.finish_reason, called.message.tool_calls[0].function];
const helped = client.chat.completions.stream(ask(call, { tools, stream: true }));
found.streamed_call = (await helped.finalChatCompletion()).choices[0].message.tool_calls[0].function.arguments;
const format = { type: "json_schema", json_schema: { name: "n", strict: true, schema: { type: "object" } } };
const parsed = await client.chat.completions.parse(ask('{"n": 1}', { response_format: format }));
found.schema = parsed.choices[0].message.parsed ?? JSON.parse(parsed.choices[0].message.content);
const scored = await client.chat.completions.create(ask("ab", { logprobs: true, top_logprobs: 2 }));
found.logprobs = scored.choices[0].logprobs.content.map((entry) => [entry.token, entry.top_logprobs.length]);
found.completion = (await client.completions.create({ model: "parrot", prompt: "hi", max_tokens: 4 })).choices[0].text;
try {
  await client.chat.completions.create(ask("x", { temperature: 9000 }));
} catch (error) {
  found.error = [error.constructor.name, error.status, error.param];
}
console.log(JSON.stringify(found));
