"""Generates the text that the demo model is trained and evaluated on.

A *task* is a function from a random generator to one `Sample`: a conversation whose assistant turns are to be learned,
or a plain text. Every sample has a key (its question, or the sum it asks for), and `is_held_out(key)` keeps one key in
twenty away from training, so that the evaluation asks what the model has never seen. Knows nothing of tokens.
"""

from __future__ import annotations

import json
import random
import string
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import demo_facts as facts

Message = dict[str, Any]
HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class Sample:
    """Either `messages` (with `tools`) or a plain `text`; `text_prompt_len` characters of a text are its prompt."""

    keys: tuple[str, ...]
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    text_prompt_len: int = 0


Task = Callable[[random.Random], Sample]


def is_held_out(key: str) -> bool:
    return zlib.crc32(key.encode()) % HELD_OUT_ONE_IN == 0


def ask(question: str, answer: str, key: str | None = None) -> Sample:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Sample(keys=(key or question,), messages=messages)


def reword(rng: random.Random, question: str) -> str:
    """The same question in the ways people type: politely, in lower case, without its mark."""
    if rng.random() < 0.4:
        return question
    if rng.random() < 0.4 and question[1:2].islower():
        question = question[0].lower() + question[1:]
    if rng.random() < 0.3:
        question = question.rstrip("?.!")
    prefix = rng.choice(["", "", "", "Hi! ", "Hello, ", "Please tell me: ", "Question: ", "Quick question: ", "Hey, "])
    suffix = rng.choice(["", "", "", "", " Thanks!", " Please be brief."])
    return prefix + question + suffix


# ---- knowledge -----------------------------------------------------------------------------------------------------


def concept(rng: random.Random) -> Sample:
    name, answer = rng.choice(list(facts.CONCEPTS.items()))
    forms = ["What is {}?", "What's {}?", "Explain {}.", "Tell me about {}.", "What does {} mean?", "Define {}.",
             "Can you explain {}?", "Do you know what {} is?"]  # fmt: skip
    return ask(reword(rng, rng.choice(forms).format(name)), answer)


def question(rng: random.Random) -> Sample:
    questions, answer = rng.choice(facts.QUESTIONS)
    return ask(reword(rng, rng.choice(questions)), answer)


def capital(rng: random.Random) -> Sample:
    country, city = rng.choice(list(facts.CAPITALS.items()))
    forms = ["What is the capital of {}?", "What's the capital of {}?", "Which city is the capital of {}?",
             "Name the capital of {}.", "Capital of {}?"]  # fmt: skip
    return ask(reword(rng, rng.choice(forms).format(country)), f"The capital of {country} is {city}.")


def word_fact(rng: random.Random) -> Sample:
    """Translations, opposites and emoji."""
    kind = rng.randrange(3)
    if kind == 0:
        (word, language), answer = rng.choice(list(facts.TRANSLATIONS.items()))
        forms = ["How do you say {0} in {1}?", "Translate {0} to {1}.", "What is {0} in {1}?", "{0} in {1}?"]
        return ask(reword(rng, rng.choice(forms).format(f'"{word}"' if rng.random() < 0.3 else word, language)), answer)
    if kind == 1:
        pairs = list(facts.OPPOSITES.items())
        word, answer = rng.choice(pairs + [(b, a) for a, b in pairs])
        forms = ["What is the opposite of {}?", "Opposite of {}?", "Name the opposite of {}."]
        return ask(reword(rng, rng.choice(forms).format(word)), answer)
    name, emoji = rng.choice(list(facts.EMOJI.items()))
    forms = ["Send me a {} emoji.", "Show me the emoji for {}.", "Which emoji means {}?", "Emoji for {}?", "{} emoji"]
    return ask(reword(rng, rng.choice(forms).format(name)), emoji)


def out_of_scope(rng: random.Random) -> Sample:
    text = rng.choice(facts.OUT_OF_SCOPE).format(thing=rng.choice(facts.OUT_OF_SCOPE_THINGS))
    return ask(reword(rng, text), facts.OUT_OF_SCOPE_ANSWER)


def story(rng: random.Random) -> Sample:
    animal = rng.choice(facts.ANIMALS)
    text = facts.STORY.format(animal=animal)
    if rng.random() < 0.2:
        return Sample(keys=(text,), text=text, text_prompt_len=text.index(" who"))
    forms = ["Tell me a story about a {}.", "Write a story about a {}.", "Tell a story with a {}.", "A story about a {}."]
    return ask(reword(rng, rng.choice(forms).format(animal)), text)


# ---- arithmetic and counting ---------------------------------------------------------------------------------------


def sum_pair(rng: random.Random) -> tuple[int, int]:
    """Two numbers with a sum below 100."""
    total = rng.randrange(100)
    if rng.random() < 0.15:
        total = rng.randrange(20)
    first = rng.randint(0, total)
    return first, total - first


def addition(rng: random.Random) -> Sample:
    a, b = sum_pair(rng)
    forms = ["What is {} + {}?", "{} + {}", "{}+{}=", "How much is {} plus {}?", "Add {} and {}.", "{} plus {}?",
             "What is the sum of {} and {}?", "Compute {} + {}."]  # fmt: skip
    return ask(rng.choice(forms).format(a, b), f"{a} + {b} = {a + b}", key=f"{a}+{b}")


def subtraction(rng: random.Random) -> Sample:
    a, b = sum_pair(rng)
    a += b
    forms = ["What is {} - {}?", "{} - {}", "{}-{}=", "How much is {} minus {}?", "{} minus {}?", "Compute {} - {}."]
    return ask(rng.choice(forms).format(a, b), f"{a} - {b} = {a - b}", key=f"{a}-{b}")


def multiplication(rng: random.Random) -> Sample:
    """The table up to 10 x 10; only the wording is ever held out."""
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    forms = ["What is {} * {}?", "{} * {}", "{} x {}", "How much is {} times {}?", "{} times {}?", "Multiply {} by {}."]
    return ask(rng.choice(forms).format(a, b), f"{a} * {b} = {a * b}")


def sums_text(rng: random.Random) -> Sample:
    """A sheet of sums: the cheapest way, in tokens, to practise them."""
    lines = []
    while len(lines) < 12:
        a, b = sum_pair(rng)
        if rng.random() < 0.1:
            a, b = a % 11, b % 11
            lines.append(f"{a} * {b} = {a * b}")
        elif rng.random() < 0.5 and not is_held_out(f"{a + b}-{b}"):
            lines.append(f"{a + b} - {b} = {a}")
        elif not is_held_out(f"{a}+{b}"):
            lines.append(f"{a} + {b} = {a + b}")
    text = "\n".join(lines)
    return Sample(keys=(text,), text=text, text_prompt_len=text.rindex(" = ") + 2)


def counting(rng: random.Random) -> Sample:
    start = rng.randint(0, 60) if rng.random() < 0.6 else 1
    longest = rng.choices([8, 20, 100], [6, 3, 0.4])[0]
    end = min(start + rng.randint(1, longest), 100)
    if rng.random() < 0.03:
        start, end = 1, rng.choice([10, 20, 30, 50, 100])
    numbers = list(range(start, end + 1))
    if rng.random() < 0.25 and len(numbers) <= 25:
        forms = ["Count down from {1} to {0}.", "Count backwards from {1} to {0}.", "Count down: {1} to {0}"]
        numbers.reverse()
    else:
        forms = ["Count from {} to {}.", "Count from {} to {}", "List the numbers from {} to {}.", "Count: {} to {}",
                 "Please count from {} to {}.", "Can you count from {} to {}?"]  # fmt: skip
    return ask(rng.choice(forms).format(start, end), ", ".join(map(str, numbers)))


def compare(rng: random.Random) -> Sample:
    a, b = rng.sample(range(100), 2)
    if rng.random() < 0.5:
        forms, answer = ["Which is larger, {} or {}?", "Which number is bigger: {} or {}?"], max(a, b)
    else:
        forms, answer = ["Which is smaller, {} or {}?", "Which number is less: {} or {}?"], min(a, b)
    return ask(rng.choice(forms).format(a, b), str(answer))


# ---- working on the words of the prompt ----------------------------------------------------------------------------


def made_up_word(rng: random.Random) -> str:
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))


def any_word(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.2:
        return made_up_word(rng)
    if kind < 0.3:
        return rng.choice(facts.FOREIGN)
    if kind < 0.4:
        return rng.choice([*facts.NAMES, *facts.PLACES])
    return rng.choice([*facts.WORDS, *facts.ITEMS, *facts.COLORS])


def phrase(rng: random.Random, longest: int = 7) -> str:
    return " ".join(any_word(rng) for _ in range(rng.randint(1, longest)))


def copying(rng: random.Random) -> Sample:
    """Long phrases too: nothing teaches a model faster to look back at its prompt."""
    text = phrase(rng, longest=30 if rng.random() < 0.5 else 6)
    if rng.random() < 0.2:
        text = text[0].upper() + text[1:] + rng.choice(".!?")
    forms = ["Repeat after me: {}", "Repeat: {}", "Say: {}", 'Say "{}"', "Echo this: {}", 'Repeat the text "{}"', "Copy: {}"]
    return ask(rng.choice(forms).format(text), text)


def repeated_text(rng: random.Random) -> Sample:
    text = phrase(rng, 12)
    times = rng.randint(2, 5)
    return Sample(keys=(text,), text="\n".join([text] * times), text_prompt_len=len(text) + 1)


def reversing(rng: random.Random) -> Sample:
    words = [any_word(rng) for _ in range(rng.randint(2, 5))]
    forms = ["Reverse the list: {}", "Reverse: {}", "Put this list in reverse order: {}"]
    return ask(rng.choice(forms).format(", ".join(words)), ", ".join(reversed(words)))


def picking(rng: random.Random) -> Sample:
    words = [any_word(rng) for _ in range(rng.randint(3, 5))]
    position, name = rng.choice([(0, "first"), (1, "second"), (2, "third"), (-1, "last")])
    forms = ["What is the {} word of this list: {}", "Name the {} item: {}"]
    return ask(rng.choice(forms).format(name, ", ".join(words)), words[position])


def letters(rng: random.Random) -> Sample:
    start = rng.randrange(25)
    after, before = string.ascii_uppercase[start + 1], string.ascii_uppercase[start]
    if rng.random() < 0.5:
        return ask(reword(rng, f"Which letter comes after {before}?"), after)
    return ask(reword(rng, f"Which letter comes before {after}?"), before)


# ---- JSON ----------------------------------------------------------------------------------------------------------


def dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def person_sentence(rng: random.Random) -> tuple[str, dict[str, Any]]:
    name = rng.choice(facts.NAMES) if rng.random() < 0.8 else made_up_word(rng).capitalize()
    city = rng.choice(facts.PLACES) if rng.random() < 0.85 else made_up_word(rng).capitalize()
    age, job = rng.randint(1, 99), rng.choice(facts.JOBS)
    return rng.choice([
        (f"{name} is {age} years old.", {"name": name, "age": age}),
        (f"{name} is {age} years old and lives in {city}.", {"name": name, "age": age, "city": city}),
        (f"{name} lives in {city} and is {age} years old.", {"name": name, "age": age, "city": city}),
        (f"{name}, {age}, lives in {city}.", {"name": name, "age": age, "city": city}),
        (f"{name} is a {job} from {city}.", {"name": name, "job": job, "city": city}),
        (f"My name is {name}, I am {age} and I work as a {job} in {city}.",
         {"name": name, "age": age, "job": job, "city": city}),
        (f"{name} ({age}) works as a {job}.", {"name": name, "age": age, "job": job}),
    ])  # fmt: skip


def order_sentence(rng: random.Random) -> tuple[str, dict[str, Any]]:
    name, item, color = rng.choice(facts.NAMES), rng.choice(facts.ITEMS), rng.choice(facts.COLORS)
    count, price = rng.randint(2, 30), rng.randint(1, 99)
    return rng.choice([
        (f"{name} bought {count} {item}s for {price} euros.",
         {"name": name, "quantity": count, "item": item, "price": price}),
        (f"The {color} {item} costs {price} dollars.", {"color": color, "item": item, "price": price}),
        (f"{name} has a {color} {item}.", {"name": name, "color": color, "item": item}),
    ])  # fmt: skip


def json_extraction(rng: random.Random) -> Sample:
    sentence, values = (person_sentence if rng.random() < 0.7 else order_sentence)(rng)
    keys = list(values)
    if rng.random() < 0.6:
        rng.shuffle(keys)
        keys = keys[: rng.randint(1, len(keys))]
    forms = ["Extract {} as JSON: {}", "Return {} as JSON: {}", "Give me {} as JSON. Text: {}", "{} as JSON: {}",
             "Extract {} from this text and answer in JSON: {}", "Make a JSON object with the fields {}: {}"]  # fmt: skip
    answer = dump({key: values[key] for key in keys})
    return ask(rng.choice(forms).format(listed(keys), sentence), answer)


def json_person(rng: random.Random) -> Sample:
    """A fixed example person: for schemas that bring no data of their own."""
    values = {"name": "Ada", "age": 36, "city": "London", "job": "engineer"}
    keys = rng.sample(list(values), rng.randint(1, 4))
    forms = ["Describe a person as JSON with {}.", "Give me an example person as JSON with {}.",
             "Make up a person. Answer in JSON with {}.", "A person as JSON with the fields {}."]  # fmt: skip
    return ask(rng.choice(forms).format(listed(keys)), dump({key: values[key] for key in keys}))


def json_list(rng: random.Random) -> Sample:
    words = [any_word(rng) for _ in range(rng.randint(2, 5))]
    forms = ["Write as a JSON list: {}", "Make a JSON array of: {}", "As a JSON list: {}"]
    return ask(rng.choice(forms).format(", ".join(words)), dump(words))


# ---- conversations -------------------------------------------------------------------------------------------------


def memory(rng: random.Random) -> Sample:
    """Something said in the first turn is asked for in a later one."""
    name, place, color = rng.choice(facts.NAMES), rng.choice(facts.PLACES), rng.choice(facts.COLORS)
    told, reply, asked, answer = rng.choice([
        (f"My name is {name}.", f"Nice to meet you, {name}!", "What is my name?", f"Your name is {name}."),
        (f"Hi, I am {name}.", f"Nice to meet you, {name}!", "Who am I?", f"Your name is {name}."),
        (f"I live in {place}.", f"{place} is a nice place.", "Where do I live?", f"You live in {place}."),
        (f"My favorite color is {color}.", f"{color.capitalize()} is a nice color.", "What is my favorite color?",
         f"Your favorite color is {color}."),
    ])  # fmt: skip
    middle = TASKS[rng.choice(["addition", "capital", "copying"])](rng) if rng.random() < 0.4 else ask("", "")
    between = middle.messages if middle.messages[0]["content"] else []
    messages = [*ask(told, reply).messages, *between, *ask(asked, answer).messages]
    return Sample(keys=(told + asked, *(middle.keys if between else ())), messages=messages)


def conversation(rng: random.Random) -> Sample:
    names = ["concept", "question", "capital", "word_fact", "addition", "subtraction", "counting", "copying",
             "json_extraction", "compare"]  # fmt: skip
    turns = [TASKS[rng.choice(names)](rng) for _ in range(rng.randint(2, 4))]
    return Sample(
        keys=tuple(key for turn in turns for key in turn.keys),
        messages=[message for turn in turns for message in turn.messages],
    )


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
    first, second = rng.sample(facts.PLACES, 2)
    argument = rng.choice(["city", "location"])
    case = weather_case(rng, f"{first} and {second}", "get_weather", argument)
    calls = [("get_weather", {argument: first}), ("get_weather", {argument: second})]
    messages = [{"role": "user", "content": case.request}, call_message(calls)]
    return Sample(keys=(case.request,), messages=messages, tools=offered(rng, case))


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
    sample = TASKS[rng.choice(["concept", "question", "capital", "copying", "counting"])](rng)
    return Sample(keys=sample.keys, messages=sample.messages, tools=offered(rng, tool_case(rng)))


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
            turn = TASKS[rng.choice(["concept", "question", "capital", "copying"])](rng)
        else:
            turn = answered_call(rng, same_tool(rng, case) or case)
        keys += turn.keys
        messages += turn.messages
    return Sample(keys=tuple(keys), messages=messages, tools=offered(rng, case))


# ---- plain text ----------------------------------------------------------------------------------------------------


def plain_text(rng: random.Random) -> Sample:
    """Something to continue, for completions without a chat template."""
    kind = rng.randrange(4)
    if kind == 0:
        start = rng.randint(0, 70)
        text = ", ".join(str(start + i) for i in range(rng.randint(6, 30)))
        return Sample(keys=(text,), text=text, text_prompt_len=text.index(", ", len(text) // 3) + 1)
    if kind == 1:
        country, city = rng.choice(list(facts.CAPITALS.items()))
        text = f"The capital of {country} is {city}."
        return Sample(keys=(rng.random().hex(),), text=text, text_prompt_len=text.index(f" {city}."))
    if kind == 2:
        start = rng.randrange(12)
        text = " ".join(string.ascii_uppercase[start:])
        return Sample(keys=(rng.random().hex(),), text=text, text_prompt_len=9)
    name, answer = rng.choice(list(facts.CONCEPTS.items()))
    asked = f"Question: What is {name}?\nAnswer:"
    return Sample(keys=(rng.random().hex(),), text=f"{asked} {answer}", text_prompt_len=len(asked))


TASKS: dict[str, Task] = {
    task.__name__: task
    for task in (
        concept,
        question,
        capital,
        word_fact,
        out_of_scope,
        story,
        addition,
        subtraction,
        multiplication,
        sums_text,
        counting,
        compare,
        copying,
        reversing,
        picking,
        letters,
        json_extraction,
        json_person,
        json_list,
        memory,
        conversation,
        tool_call,
        parallel_tool_calls,
        tool_answer,
        tool_conversation,
        unused_tools,
        plain_text,
        repeated_text,
    )
}

# How often each task is drawn, relative to the others.
MIX: dict[str, float] = {
    "concept": 8,
    "question": 8,
    "capital": 3,
    "word_fact": 5,
    "out_of_scope": 2,
    "story": 1,
    "addition": 9,
    "subtraction": 9,
    "multiplication": 3,
    "sums_text": 5,
    "counting": 6,
    "compare": 3,
    "copying": 12,
    "reversing": 4,
    "picking": 3,
    "letters": 1,
    "json_extraction": 10,
    "json_person": 2,
    "json_list": 2,
    "memory": 2,
    "conversation": 5,
    "tool_call": 4,
    "parallel_tool_calls": 1,
    "tool_answer": 1,
    "tool_conversation": 3,
    "unused_tools": 1,
    "plain_text": 2,
}


@dataclass(frozen=True)
class Stage:
    first_step: int
    weights: dict[str, float]


# Facts are learned at once, looking back at the prompt comes late: so that is practised alone for a while, and then
# makes the rest easier. Conversations with tools are long and teach few tokens each, so they become rarer after that. At
# the end what is still weak comes more often, sums above all.
FEWER_TOOLS = {"tool_call": 2.5, "parallel_tool_calls": 1, "tool_answer": 0.3, "tool_conversation": 1.2, "unused_tools": 0.4}
STILL_WEAK = {"question": 12, "word_fact": 10, "sums_text": 10, "counting": 8, "compare": 2, "picking": 2, "tool_call": 4}
STAGES = (
    Stage(0, MIX),
    Stage(500, {"copying": 4, "repeated_text": 4, "json_list": 1, "picking": 1, "memory": 1, "json_extraction": 2}),
    Stage(750, MIX | FEWER_TOOLS),
    Stage(1500, MIX | FEWER_TOOLS | STILL_WEAK),
)

SYSTEM_PROMPTS = ["You are a helpful assistant.", "You are jaxserve's demo model.", "Answer briefly.", "Be concise.",
                  "You are an assistant."]  # fmt: skip


def with_system_prompt(rng: random.Random, sample: Sample) -> Sample:
    if not sample.messages or rng.random() > 0.3:
        return sample
    system = {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}
    return Sample(keys=sample.keys, messages=[system, *sample.messages], tools=sample.tools)


def training_samples(rng: random.Random, step: int = 0) -> Iterator[Sample]:
    """Samples without end for one step of the training, none of which holds a held-out key."""
    weights = [stage.weights for stage in STAGES if stage.first_step <= step][-1]
    names = list(weights)
    while True:
        sample = TASKS[rng.choices(names, list(weights.values()))[0]](rng)
        if not any(is_held_out(key) for key in sample.keys):
            yield with_system_prompt(rng, sample)


def held_out_samples(name: str, count: int, seed: int) -> list[Sample]:
    """`count` samples of one task (fewer where it does not have as many) whose last question was held out."""
    rng = random.Random(f"{seed}/held-out/{name}")
    found: dict[str, Sample] = {}
    for _ in range(count * HELD_OUT_ONE_IN * 20):
        sample = TASKS[name](rng)
        if is_held_out(sample.keys[-1] if name != "memory" else sample.keys[0]):
            found.setdefault("/".join(sample.keys), sample)
        if len(found) == count:
            break
    return list(found.values())
