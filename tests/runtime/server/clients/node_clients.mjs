// JavaScript clients with their defaults: `node node_clients.mjs CLIENT URL` prints, as JSON, what they were answered.
// Each has four functions: one says hi, one lets a tool be called, one has a schema filled, one stops an answer.

import Anthropic from "@anthropic-ai/sdk";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, streamText, tool } from "ai";
import { Ollama } from "ollama";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [name, baseURL] = process.argv.slice(2);
const access = { baseURL, apiKey: "secret" };
const model = "small";
const [HI, CALL, FILL] = ["say hi", 'call weather {"city": "Rome"}', 'fill {"name": "Rex", "kind": "dog"}'];
const Pet = z.object({ name: z.string(), kind: z.enum(["cat", "dog"]) });
const City = z.object({ city: z.string() });
const described = { name: "weather", description: "Tells the weather.", parameters: z.toJSONSchema(City) };
const weather = ({ city }) => `sunny in ${city}`;
const said = (content) => [{ role: "user", content }];
const LONG = "slow 190";
// The first text of a stream, which is then left.
const first = async (stream, text) => {
  for await (const part of stream) if (text(part)) return text(part);
};

const openai_chat = () => {
  const chat = new OpenAI(access).chat.completions;
  const tools = [{ type: "function", function: { ...described, function: weather, parse: JSON.parse } }];
  const form = zodResponseFormat(Pet, "pet");
  return {
    hi: async () => (await chat.create({ model, messages: said(HI) })).choices[0].message.content,
    tool: () => chat.runTools({ model, messages: said(CALL), tools }).finalContent(),
    schema: async () => (await chat.parse({ model, messages: said(FILL), response_format: form })).choices[0].message.parsed,
    stop: async () => first(await chat.create({ model, messages: said(LONG), stream: true }), (part) => part.choices[0].delta.content),
  };
};

const openai_responses = () => {
  const responses = new OpenAI(access).responses;
  const tools = [{ type: "function", ...described }];
  const called = async () => {
    const { output } = await responses.create({ model, input: CALL, tools });
    const { call_id, arguments: given } = output.find((item) => item.type === "function_call");
    const result = { type: "function_call_output", call_id, output: weather(JSON.parse(given)) };
    return (await responses.create({ model, input: [...said(CALL), ...output, result], tools })).output_text;
  };
  return {
    hi: async () => (await responses.create({ model, input: HI })).output_text,
    tool: called,
    schema: async () => (await responses.parse({ model, input: FILL, text: { format: zodTextFormat(Pet, "pet") } })).output_parsed,
    stop: async () => first(await responses.create({ model, input: LONG, stream: true }), (part) => part.delta),
  };
};

const ai_sdk = (provider) => () => {
  const generate = (prompt, more) => generateText({ model: provider(model), prompt, ...more });
  const tools = { weather: tool({ description: described.description, inputSchema: City, execute: weather }) };
  return {
    hi: async () => (await generate(HI)).text,
    tool: async () => (await generate(CALL, { tools, stopWhen: isStepCount(2) })).text,
    schema: async () => (await generate(FILL, { output: Output.object({ schema: Pet }) })).output,
    stop: async () => {
      const hangUp = new AbortController();
      const { textStream } = streamText({ model: provider(model), prompt: LONG, abortSignal: hangUp.signal });
      const word = await first(textStream, (text) => text);
      hangUp.abort();
      return word;
    },
  };
};

const ai_sdk_compatible = ai_sdk(createOpenAICompatible({ name: "lowbit-chat", ...access }));
const ai_sdk_openai = ai_sdk(createOpenAI(access));

const anthropic = () => {
  const client = new Anthropic({ baseURL: baseURL.replace(/\/v1$/, ""), apiKey: access.apiKey });
  const usual = { model, max_tokens: 1000 };
  const tools = [{ name: described.name, description: described.description, input_schema: described.parameters }];
  const called = async () => {
    const { content } = await client.messages.create({ ...usual, messages: said(CALL), tools });
    const { id, input } = content.find((block) => block.type === "tool_use");
    const result = { type: "tool_result", tool_use_id: id, content: weather(input) };
    const messages = [...said(CALL), { role: "assistant", content }, { role: "user", content: [result] }];
    return (await client.messages.create({ ...usual, messages, tools })).content[0].text;
  };
  const format = { type: "json_schema", schema: z.toJSONSchema(Pet) };
  return {
    hi: () => client.messages.stream({ ...usual, messages: said(HI) }).finalText(),
    tool: called,
    schema: async () => JSON.parse((await client.messages.create({ ...usual, messages: said(FILL), output_config: { format } })).content[0].text),
    stop: () => first(client.messages.stream({ ...usual, messages: said(LONG) }), (part) => part.delta?.text),
  };
};

const ollama = () => {
  const headers = { Authorization: `Bearer ${access.apiKey}` };
  const client = new Ollama({ host: baseURL.replace(/\/v1$/, ""), headers });
  const tools = [{ type: "function", function: described }];
  const called = async () => {
    const { message } = await client.chat({ model, messages: said(CALL), tools });
    const { name: tool_name, arguments: given } = message.tool_calls[0].function;
    const messages = [...said(CALL), message, { role: "tool", tool_name, content: weather(given) }];
    return (await client.chat({ model, messages, tools })).message.content;
  };
  const streamed = async () => {
    let text = "";
    for await (const part of await client.chat({ model, messages: said(HI), stream: true })) text += part.message.content;
    return text;
  };
  return {
    hi: streamed,
    tool: called,
    schema: async () => JSON.parse((await client.chat({ model, messages: said(FILL), format: z.toJSONSchema(Pet) })).message.content),
    stop: async () => {
      const stream = await client.chat({ model, messages: said(LONG), stream: true });
      const word = await first(stream, (part) => part.message.content);
      stream.abort();
      return word;
    },
  };
};

const clients = { openai_chat, openai_responses, ai_sdk_compatible, ai_sdk_openai, anthropic, ollama };
const told = {};
for (const [what, ask] of Object.entries(clients[name]())) {
  told[what] = await ask().catch(String);
}
process.stdout.write(JSON.stringify(told), () => process.exit());
