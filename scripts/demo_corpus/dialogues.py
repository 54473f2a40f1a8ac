"""Tasks of several turns: conversations, and calls of tools."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import demo_facts as facts

from demo_corpus.newcomers import beyond, continued, foreign, greeting, noise, paste, small_talk, supported
from demo_corpus.questions import (
    addition,
    capital,
    compare,
    concept,
    count_to,
    counting,
    large_numbers,
    question,
    subtraction,
    word_fact,
)
from demo_corpus.sample import Message, Sample, ask, is_held_out, reword
from demo_corpus.words import copying, dump, json_extraction, listed, made_up_word, phrase


def memory(rng: random.Random) -> Sample:
    """Something said in the first turn is asked for in a later one."""
    name, place, color = rng.choice(facts.NAMES), rng.choice(facts.PLACES), rng.choice(facts.COLORS)
    if rng.random() < 0.3:
        name = made_up_word(rng).capitalize()
    told, reply, asked, answer = rng.choice([
        (f"My name is {name}.", f"Nice to meet you, {name}!", "What is my name?", f"Your name is {name}."),
        (f"I'm {name}", f"Nice to meet you, {name}!", "what's my name?", f"Your name is {name}."),
        (f"Hello, my name is {name}!", f"Nice to meet you, {name}!", "Do you remember my name?", f"Your name is {name}."),
        (f"Hi, I am {name}.", f"Nice to meet you, {name}!", "Who am I?", f"Your name is {name}."),
        (f"I live in {place}.", f"{place} is a nice place.", "Where do I live?", f"You live in {place}."),
        (f"My favorite color is {color}.", f"{color.capitalize()} is a nice color.", "What is my favorite color?",
         f"Your favorite color is {color}."),
    ])  # fmt: skip
    if rng.random() < 0.15:
        return ask(reword(rng, asked), "You have not told me yet.")
    middle = rng.choice([addition, capital, copying])(rng) if rng.random() < 0.4 else ask("", "")
    between = middle.messages if middle.messages[0]["content"] else []
    messages = [*ask(told, reply).messages, *between, *ask(asked, answer).messages]
    return Sample(keys=(told + asked, *(middle.keys if between else ())), messages=messages)


def turn(rng: random.Random) -> Sample:
    """One question and its answer, of any kind that may come up in a conversation."""
    knowing = [concept, question, capital, word_fact, addition, subtraction, counting, copying, json_extraction, compare]
    talking = [
        greeting,
        small_talk,
        small_talk,
        small_talk,
        beyond,
        beyond,
        beyond,
        noise,
        foreign,
        supported,
        count_to,
        large_numbers,
    ]
    return rng.choice(rng.choice([knowing, talking]))(rng)


def joined(turns: list[Sample]) -> Sample:
    return Sample(
        keys=tuple(key for turn in turns for key in turn.keys),
        messages=[message for turn in turns for message in turn.messages],
    )


def conversation(rng: random.Random) -> Sample:
    return joined([turn(rng) for _ in range(rng.randint(2, 5))])


def long_conversation(rng: random.Random) -> Sample:
    """Of some thousand tokens: held-out questions are left out, or hardly any would remain."""
    turns = [paste(rng) if rng.random() < 0.1 else turn(rng) for _ in range(rng.randint(10, 45))]
    return joined([turn for turn in turns if not any(is_held_out(key) for key in turn.keys)])


def raw_question(rng: random.Random) -> Sample:
    """A question without a chat template, answered in the next line."""
    question_mark = [concept, question, capital, beyond, addition, subtraction, small_talk, supported]
    asked = rng.choice(question_mark)(rng)
    text, answer = (message["content"] for message in asked.messages)
    return continued(text.rstrip("?!., ") + "?", "\n" + answer)


# ---- tools ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolCase:
    """One tool as offered, and one request that calls it."""

    name: str
    description: str
    properties: dict[str, str]  # argument -> JSON type
    request: str
    arguments: dict[str, Any]

    def schema(self, rng: random.Random) -> dict[str, Any]:
        """The tool in OpenAI's form, with and without what people leave out."""
        function: dict[str, Any] = {"name": self.name}
        if rng.random() < 0.8:
            function["description"] = self.description
        properties: dict[str, Any] = {name: {"type": kind} for name, kind in self.properties.items()}
        if rng.random() < 0.2:
            for name in properties:
                properties[name]["description"] = f"The {name}."
        if "weather" in self.name and rng.random() < 0.2:
            properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        function["parameters"] = {"type": "object", "properties": properties}
        if rng.random() < 0.85:
            function["parameters"]["required"] = list(self.arguments)
        return {"type": "function", "function": function}


def weather_case(rng: random.Random, place: str, name: str, argument: str) -> ToolCase:
    request = rng.choice(["What is the weather in {}?", "What's the weather like in {}?", "How is the weather in {}?",
                          "Weather in {}?", "Is it raining in {}?", "Tell me the weather in {}."])  # fmt: skip
    return ToolCase(name, "Get the weather of a city.", {argument: "string"}, request.format(place), {argument: place})


def tool_case(rng: random.Random) -> ToolCase:
    place = rng.choice(facts.PLACES) if rng.random() < 0.85 else made_up_word(rng).capitalize()
    a, b, words, name = rng.randint(0, 99), rng.randint(0, 99), phrase(rng, 4), rng.choice(facts.NAMES)
    x, y = rng.choice(["ab", "xy"])
    query, city = rng.choice(["query", "q", "text"]), rng.choice(["city", "location", "place"])
    person, made_up, field_name = rng.choice(["to", "name"]), made_up_word(rng), rng.choice(["id", "value", "text", "key"])
    numbers = {x: "integer", y: "integer"}
    cases: list[tuple[str, str, dict[str, str], list[str], dict[str, Any]]] = [
        (rng.choice(["add", "sum_numbers"]), "Add two numbers.", numbers,
         ["What is {0} + {1}?", "Add {0} and {1}.", "Use the tool to add {0} and {1}."], {x: a, y: b}),
        (rng.choice(["multiply", "product"]), "Multiply two numbers.", numbers,
         ["What is {0} times {1}?", "Multiply {0} and {1}.", "What is {0} * {1}?"], {x: a, y: b}),
        (rng.choice(["search", "web_search"]), "Search the web.", {query: "string"},
         ["Search for {0}", "Search the web for {0}", "Look up {0}", "Find pages about {0}"], {query: words}),
        (rng.choice(["get_time", "get_current_time"]), "Get the time in a city.", {city: "string"},
         ["What time is it in {0}?", "Tell me the time in {0}."], {city: place}),
        ("set_timer", "Set a timer.", {"minutes": "integer"},
         ["Set a timer for {0} minutes.", "Wake me in {0} minutes."], {"minutes": a}),
        (rng.choice(["send_message", "send_email"]), "Send a message.", {person: "string", "text": "string"},
         ["Send {0} the message: {1}", "Tell {0}: {1}", "Write to {0}: {1}"], {person: name, "text": words}),
        ("play_music", "Play a song.", {"song": "string"}, ["Play {0}", "Play the song {0}"], {"song": words}),
        ("get_stock_price", "Get a stock price.", {"symbol": "string"},
         ["What is the stock price of {0}?", "Stock price of {0}?"], {"symbol": made_up.upper()[:4]}),
        (f"{rng.choice(['get', 'run', 'lookup', 'my'])}_{made_up}", "A tool.", {field_name: "string"},
         ["Call the tool with {0}", "Use your tool on {0}", "Call it with " + field_name + " {0}"], {field_name: words}),
    ]  # fmt: skip
    if rng.random() < 0.3:
        return weather_case(rng, place, rng.choice(["get_weather", "get_weather", "get_current_weather"]), city)
    tool, description, properties, requests, arguments = rng.choice(cases)
    return ToolCase(tool, description, properties, rng.choice(requests).format(*arguments.values()), arguments)


def call_message(calls: list[tuple[str, dict[str, Any]]]) -> Message:
    functions = [{"type": "function", "function": {"name": name, "arguments": args}} for name, args in calls]
    return {"role": "assistant", "content": "", "tool_calls": functions}


def offered(rng: random.Random, case: ToolCase) -> list[dict[str, Any]]:
    """The tool of the case among up to two others, in any order."""
    cases = {case.name: case}
    for _ in range(rng.choices([0, 1, 2], [5, 3, 1])[0]):
        other = tool_case(rng)
        if other.description != case.description:
            cases.setdefault(other.name, other)
    tools = list(cases.values())
    rng.shuffle(tools)
    return [tool.schema(rng) for tool in tools]


def tool_call(rng: random.Random) -> Sample:
    case = tool_case(rng)
    messages = [{"role": "user", "content": case.request}, call_message([(case.name, case.arguments)])]
    return Sample(keys=(case.request,), messages=messages, tools=offered(rng, case))


def parallel_tool_calls(rng: random.Random) -> Sample:
    """The weather in two or three cities, or two requests in one sentence."""
    if rng.random() < 0.25:
        return two_requests(rng)
    places = rng.sample(facts.PLACES, rng.choice([2, 2, 3]))
    argument = rng.choice(["city", "location"])
    case = weather_case(rng, listed(places), "get_weather", argument)
    messages = [
        {"role": "user", "content": case.request},
        call_message([("get_weather", {argument: place}) for place in places]),
    ]
    return Sample(keys=(case.request,), messages=messages, tools=offered(rng, case))


def two_requests(rng: random.Random) -> Sample:
    first, second = tool_case(rng), tool_case(rng)
    while second.description == first.description:
        second = tool_case(rng)
    request = rng.choice(["{} {}", "{} And {}", "{} Then {}"]).format(first.request, second.request)
    messages = [{"role": "user", "content": request}, call_message([(case.name, case.arguments) for case in (first, second)])]
    tools = [case.schema(rng) for case in (first, second)]
    rng.shuffle(tools)
    return Sample(keys=(request,), messages=messages, tools=tools)


def answered_call(rng: random.Random, case: ToolCase) -> Sample:
    """The call, what the tool answers, and the turn after it."""
    result, answer = str(rng.randint(0, 99)), ""
    if "weather" in case.name:
        place, degrees = next(iter(case.arguments.values())), rng.randint(0, 39)
        condition = rng.choice(["sunny", "cloudy", "rainy", "windy", "snowy", "foggy"])
        values = {"temperature": degrees, "condition": condition}
        if rng.random() < 0.3:
            values = {"city": place, "condition": condition, "temperature": degrees}
        result = dump(values) if rng.random() < 0.7 else f"{condition}, {degrees} °C"
        answer = f"The weather in {place} is {condition} with {degrees} °C."
    elif "search" in case.name:
        result = phrase(rng, 5)
        answer = f"I found: {result}"
    answer = answer or f"The result is {result}."
    messages = [
        {"role": "user", "content": case.request},
        call_message([(case.name, case.arguments)]),
        {"role": "tool", "content": result},
        {"role": "assistant", "content": answer},
    ]
    return Sample(keys=(case.request + result,), messages=messages)


def tool_answer(rng: random.Random) -> Sample:
    case = tool_case(rng)
    answered = answered_call(rng, case)
    return Sample(keys=answered.keys, messages=answered.messages, tools=offered(rng, case))


def unused_tools(rng: random.Random) -> Sample:
    """Tools are offered, the question needs none."""
    while True:
        sample = rng.choice([concept, question, capital, copying, counting, greeting, small_talk, beyond])(rng)
        tools = offered(rng, tool_case(rng))
        names = "_".join(tool["function"]["name"] for tool in tools)
        if not any(part in sample.messages[0]["content"].lower() for part in names.split("_")):
            return Sample(keys=sample.keys, messages=sample.messages, tools=tools)


def same_tool(rng: random.Random, case: ToolCase) -> ToolCase | None:
    """Another request to the same tool, unless it is a rare one."""
    for _ in range(300):
        other = tool_case(rng)
        if (other.name, other.properties) == (case.name, case.properties):
            return other
    return None


def tool_conversation(rng: random.Random) -> Sample:
    """Several requests on one list of tools, some of which need no tool."""
    case = tool_case(rng)
    keys: list[str] = []
    messages: list[Message] = []
    for _ in range(rng.randint(2, 4)):
        if rng.random() < 0.3:
            turn = rng.choice([concept, question, capital, copying, small_talk])(rng)
        else:
            turn = answered_call(rng, same_tool(rng, case) or case)
        keys += turn.keys
        messages += turn.messages
    return Sample(keys=tuple(keys), messages=messages, tools=offered(rng, case))
