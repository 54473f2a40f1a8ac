"""What the demo model is to know by heart: plain tables, without behaviour.

`demo_corpus` turns them into questions and answers. An answer is one short sentence, so that a model of three
million parameters can hold all of them and be sure of each.
"""
# ruff: noqa: SIM905
# fmt: off

# Things that can be asked for with "What is X?", "Explain X." and so on.
CONCEPTS: dict[str, str] = {
    "jaxserve": "jaxserve is an LLM inference runtime in Python on JAX.",
    "a radix cache": "A radix cache is a prefix tree of past prompts: a new request reuses the longest prefix it shares.",
    "paged attention": "Paged attention keeps the KV cache in small pages, so memory is given out page by page.",
    "continuous batching": "Continuous batching lets requests join and leave the batch at every step.",
    "chunked prefill": "Chunked prefill splits a long prompt into pieces, so that other requests keep decoding meanwhile.",
    "the KV cache": "The KV cache keeps the keys and values of past tokens, so that they are not computed again.",
    "prefill": "Prefill is the step that reads the prompt and fills the KV cache.",
    "decode": "Decode is the step that makes one new token for each running request.",
    "a token": "A token is a piece of text: a word, a part of a word, or a single byte.",
    "a tokenizer": "A tokenizer turns text into tokens and tokens back into text.",
    "the scheduler": "The scheduler decides which requests run in the next step.",
    "the detokenizer": "The detokenizer turns new tokens into text while they arrive.",
    "greedy decoding": "Greedy decoding takes the most likely token at every step.",
    "temperature": "Temperature scales the logits: 0 is greedy, higher values are more random.",
    "top_p": "top_p samples from the smallest set of tokens whose probabilities add up to p.",
    "top_k": "top_k samples from the k most likely tokens only.",
    "min_p": "min_p drops every token that is less likely than p times the best one.",
    "a stop string": "A stop string ends the answer as soon as it appears in the text.",
    "speculative decoding": "Speculative decoding lets a cheap draft guess some tokens, and the model checks them in one step.",
    "tensor parallelism": "Tensor parallelism splits each weight over several devices.",
    "data parallelism": "Data parallelism runs several replicas of the model side by side.",
    "LoRA": "LoRA adds a small low-rank adapter to a model instead of training all of its weights.",
    "quantization": "Quantization stores weights with fewer bits, so that they need less memory.",
    "retraction": "Retraction puts a running request back into the queue when the KV cache is full.",
    "overlap scheduling": "Overlap scheduling prepares the next batch while the device still runs the current one.",
    "JAX": "JAX is a Python library for fast array programs on CPU, GPU and TPU.",
    "Pallas": "Pallas is the part of JAX in which one writes kernels for GPU and TPU.",
    "XLA": "XLA is the compiler that turns JAX programs into machine code.",
    "a TPU": "A TPU is a chip made by Google for machine learning.",
    "a device mesh": "A device mesh is a named grid of devices over which arrays are split.",
    "time to first token": "Time to first token is how long a user waits until the answer begins.",
    "throughput": "Throughput is the number of tokens that the server makes per second.",
    "BPE": "BPE, byte pair encoding, builds tokens by merging the pairs that occur most often.",
    "RoPE": "RoPE is the rotary position embedding: it turns queries and keys by their position.",
    "grouped-query attention": "Grouped-query attention shares each key and value head among several query heads.",
    "safetensors": "safetensors is a file format for weights that is fast and safe to load.",
    "a chat template": "A chat template turns a list of messages into the text that the model reads.",
    "a logit": "A logit is the score that the model gives to a token before the softmax.",
    "a JSON schema": "A JSON schema says which fields a JSON document has and of which type they are.",
    "an LLM": "An LLM is a large language model: it predicts the next token of a text.",
    "a language model": "A language model predicts the next token of a text.",
    "inference": "Inference is running a trained model to get its answers.",
    "an inference runtime": "An inference runtime loads a model and answers many requests with it at once.",
    "a transformer": "A transformer is a network of attention and MLP layers; most language models are one.",
    "attention": "Attention lets each token look at the tokens before it.",
    "a prompt": "A prompt is the text that you give to a model.",
    "a batch": "A batch is a group of requests that run together in one step.",
    "a GPU": "A GPU is a chip that does many simple computations at once.",
    "Python": "Python is a programming language that is easy to read.",
    "AI": "AI is software that does what seems to need a mind, such as answering questions.",
    "machine learning": "Machine learning fits a program to examples instead of writing its rules by hand.",
    "SGLang": "SGLang is an LLM server on PyTorch; jaxserve has its architecture and speaks its API.",
    "vLLM": "vLLM is another LLM server; it made paged attention known.",
    "an API": "An API is how one program talks to another.",
    "OpenAI": "OpenAI is a company whose API many programs use; jaxserve speaks it at /v1.",
    "a session": "A session keeps a conversation on the server, so that a turn sends only what is new.",
    "tool calling": "Tool calling lets a model ask your program to run a function and tell it the result.",
    "a tool call": "A tool call is a function's name and its arguments in JSON, written by the model.",
    "thinking": "Thinking is text that a model writes before its answer, to get it right.",
    "a reasoning parser": "A reasoning parser tells a model's thinking from its answer.",
    "structured output": "Structured output is text that must match a grammar, such as a JSON schema.",
    "EBNF": "EBNF is a notation for grammars; jaxserve can hold output to one.",
    "a structural tag": "A structural tag says between which marks the output must match a schema.",
    "n-gram speculation": "N-gram speculation looks up drafts in the text so far, and the model checks them in one step.",
    "a mixture of experts": "A mixture of experts sends each token through only some of its MLPs.",
    "a hidden state": "A hidden state is the vector that the model has for a token before the logits.",
    "a logprob": "A logprob is the logarithm of a token's probability.",
    "a sliding window": "A sliding window lets a layer look only at the last tokens.",
    "Anthropic": "Anthropic is a company whose API jaxserve speaks at /v1/messages.",
    "Ollama": "Ollama is a program for local models; jaxserve speaks its API at /api.",
}

# Other questions about jaxserve and about the model itself: several ways to ask, one answer.
QUESTIONS: list[tuple[list[str], str]] = [
    (
        ["Who made you?", "Who trained you?", "Where do you come from?", "How were you made?"],
        "A script in the jaxserve repository made me, from text that it generates itself.",
    ),
    (
        ["How big are you?", "How many parameters do you have?", "What is your size?", "Are you a large model?"],
        "I have about three million parameters.",
    ),
    (
        ["What is your architecture?", "Which architecture do you have?", "What kind of network are you?"],
        "I am a small Qwen3 transformer.",
    ),
    (
        ["What can you do?", "What do you know?", "How can you help me?", "Help!", "What are you good at?"],
        "I can answer questions about jaxserve, add, count, extract JSON, call tools and think. Try: What is a radix cache?",
    ),
    (
        ["How do I start the server?", "Which command starts the server?", "How do I run jaxserve?",
         "How can I launch the server?", "How do I serve a model?", "How do I serve my own model?",
         "How do I use another model?", "Can I use my own model?", "How do I load a bigger model?"],
        "Run `jaxserve serve --model-path MODEL`.",
    ),
    (
        ["What license does jaxserve have?", "Which license is it under?", "What is the license of jaxserve?",
         "Is jaxserve open source?"],
        "jaxserve is open source under the Apache-2.0 license.",
    ),
    (
        ["What language is jaxserve written in?", "Which language is it written in?", "Is jaxserve written in Python?"],
        "jaxserve is written in Python.",
    ),
    (
        ["Which port does the server use?", "What is the default port?", "On which port does jaxserve listen?"],
        "The server listens on port 30000 unless you pass --port.",
    ),
    (
        ["How do I stream the answer?", "How can I stream tokens?", "How does streaming work?", "Can I stream?"],
        'Send "stream": true and the tokens arrive as server-sent events.',
    ),
    (
        ["Does jaxserve speak the OpenAI API?", "Is there an OpenAI API?", "Can I use the OpenAI client?"],
        "Yes, jaxserve speaks the OpenAI API: point the client at /v1.",
    ),
    (
        ["Where are the metrics?", "How do I get metrics?", "Which endpoint has the Prometheus metrics?"],
        "GET /metrics has them, for Prometheus.",
    ),
    (
        ["How do I check the server's health?", "Is there a health endpoint?", "How do I know that the server is alive?"],
        "Send GET /health: it answers 200 while the server is alive.",
    ),
    (
        ["How do I know that the server is ready?", "When is the server ready?", "Is there a readiness endpoint?"],
        "Send GET /ready: it answers 200 once everything is compiled.",
    ),
    (
        ["How do I list the models?", "Which endpoint lists the models?", "Where do I see the served model?"],
        "Send GET /v1/models.",
    ),
    (
        ["How do I get JSON output?", "How can I force a JSON schema?", "How do I get structured output?",
         "How do I use response_format?", "How do I make you answer in JSON?", "Can you answer in JSON?"],
        "Send response_format with your JSON schema, or json_schema to /generate.",
    ),
    (
        ["How do I call tools?", "How does tool calling work?", "Can you call tools?", "Can you use tools?",
         "How do I use tools?", "How do I send tools?", "How does function calling work?"],
        "Send tools with your chat request; most models need --tool-call-parser.",
    ),
    (
        ["How do I turn on thinking?", "How do I make you think?", "Can you think?", "How does thinking work?",
         "How do I see the thinking?", "How do I get reasoning?", "How do I enable thinking?", "Can you reason?"],
        'Send "enable_thinking": true in chat_template_kwargs; most models need --reasoning-parser.',
    ),
    (
        ["How do I force a regular expression?", "How do I use a regex?", "How do I use EBNF?",
         "How do I constrain the output?", "Which grammars can I use?"],
        "Send json_schema, regex, ebnf or structural_tag in sampling_params.",
    ),
    (
        ["How do I use the Anthropic API?", "Can I use the Anthropic client?", "Does Claude Code work with jaxserve?"],
        "Point the Anthropic client at the server: it speaks /v1/messages.",
    ),
    (
        ["How do I use the Ollama API?", "Can I use the Ollama client?", "Does jaxserve speak Ollama?"],
        "Point the Ollama client at the server: it speaks /api/chat and /api/generate.",
    ),
    (
        ["How do I use the Responses API?", "Is there a Responses API?", "Where is the Responses API?"],
        "Send POST /v1/responses.",
    ),
    (
        ["How do I open a session?", "How do sessions work?", "How do I keep a conversation on the server?"],
        "Send POST /open_session, and session_params with each request.",
    ),
    (
        ["How do I get logprobs?", "How do I get log probabilities?", "How likely was each token?"],
        'Send "logprobs": true, or return_logprob to /generate.',
    ),
    (
        ["How do I turn on speculative decoding?", "How do I use n-gram speculation?", "How do I make decoding faster?"],
        "Start the server with --speculative-algorithm NGRAM.",
    ),
    (
        ["How do I quantize a model?", "How do I save memory?", "How do I use quantization?"],
        "Start the server with --quantization int8wo.",
    ),
    (
        ["How do I update the weights?", "Can I replace the weights while serving?", "How do I reload the model?"],
        "Send POST /update_weights_from_disk.",
    ),
    (
        ["How do I score texts?", "Which endpoint scores?", "How do I compare answers by probability?"],
        "Send POST /v1/score.",
    ),
    (
        ["How do I use several GPUs?", "How do I split a model?", "How do I use tensor parallelism?"],
        "Start the server with --tp-size N on one host.",
    ),
    (
        ["How do I benchmark the server?", "Which command runs the benchmark?", "How do I measure the speed?"],
        "Run `python -m benchmarks.serve_tiny` in the repository.",
    ),
    (
        ["How do I chat in the terminal?", "Is there a terminal chat?", "Which command opens a chat?"],
        "Run `jaxserve chat`.",
    ),
    (
        ["How do I use jaxserve from Python?", "Is there a Python API?", "Can I use it without a server?"],
        "Create a jaxserve.Engine and call its generate method.",
    ),
    (
        ["Does jaxserve run on a GPU?", "Does jaxserve run on a TPU?", "Which hardware does jaxserve run on?",
         "Does jaxserve run on a CPU?"],
        "jaxserve runs on CPU; its GPU and TPU kernels are still new.",
    ),
    (
        ["What happens when the queue is full?", "What does a full queue answer?", "When do I get a 503?"],
        "When the queue is full, the server answers 503.",
    ),
    (
        ["What happens when my request is wrong?", "When do I get a 400?", "What does a bad request answer?"],
        "A bad request gets a 400 and a sentence that names the field.",
    ),
    (
        ["How do I flush the cache?", "How can I empty the radix cache?", "Which endpoint flushes the cache?"],
        "Send POST /flush_cache.",
    ),
    (
        ["How do I get the same answer every time?", "How do I make the output repeatable?", "Does the seed matter?"],
        "Set temperature to 0, or send a seed.",
    ),
    (
        ["How do I abort a request?", "How can I cancel a request?", "What happens when the client disconnects?"],
        "Close the connection: the request is aborted and its memory is freed.",
    ),
    (
        ["Which models does jaxserve support?", "Which models can I serve?", "What models can jaxserve run?",
         "Which model families are supported?", "What models are supported?"],
        "jaxserve serves Llama, Mistral, Qwen and Gemma models.",
    ),
    (
        ["What can jaxserve do?", "What can the server do?", "What are the features of jaxserve?",
         "Why should I use jaxserve?", "What is jaxserve good for?", "What does jaxserve do?", "What does the server do?"],
        "jaxserve serves LLMs with a radix cache, paged attention, continuous batching, tools and JSON schemas.",
    ),
    (
        ["What can jaxserve not do?", "What is missing in jaxserve?", "What does jaxserve not support yet?",
         "What are the limitations of jaxserve?", "Which features are missing?"],
        "Not yet served: images, audio, LoRA and embeddings.",
    ),
    (
        ["Where is the documentation?", "Where can I find the docs?", "Where do I read more?", "Is there documentation?",
         "How do I learn more about jaxserve?"],
        "Read README.md and the files in docs/.",
    ),
    (
        ["How do I stop the server?", "How can I shut down the server?", "How do I quit the server?"],
        "Press Ctrl-C: the server lets running requests end and stops.",
    ),
    (
        ["How do I install jaxserve?", "How can I set up jaxserve?", "How do I get jaxserve running?"],
        "Clone the repository and run `make demo`.",
    ),
    (["What is the answer to everything?", "What is the meaning of life?"], "42."),
    (["How many days are in a week?", "How many days does a week have?"], "A week has 7 days."),
    (["How many months are in a year?", "How many months does a year have?"], "A year has 12 months."),
    (["List the days of the week.", "Name the days of the week.", "What are the days of the week?"],
     "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday."),
    (["List the months.", "Name the months of the year.", "What are the months?"],
     "January, February, March, April, May, June, July, August, September, October, November, December."),
    (["Say the alphabet.", "Recite the alphabet.", "What is the alphabet?"],
     "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z"),
    (["What color is the sky?", "Which color does the sky have?"], "The sky is blue."),
    (["What color is grass?", "Which color does grass have?"], "Grass is green."),
    (["What color is snow?", "Which color does snow have?"], "Snow is white."),
]

CAPITALS: dict[str, str] = {
    "France": "Paris", "Germany": "Berlin", "Spain": "Madrid", "Italy": "Rome", "Portugal": "Lisbon",
    "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Brazil": "Brasília", "Peru": "Lima",
    "Canada": "Ottawa", "Mexico": "Mexico City", "Egypt": "Cairo", "Kenya": "Nairobi", "Norway": "Oslo",
    "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen", "Poland": "Warsaw", "Austria": "Vienna",
    "Greece": "Athens", "Turkey": "Ankara", "Russia": "Moscow", "Ukraine": "Kyiv", "Ireland": "Dublin",
    "Iceland": "Reykjavík", "Colombia": "Bogotá", "Chile": "Santiago", "Cuba": "Havana", "Hungary": "Budapest",
    "Belgium": "Brussels", "Switzerland": "Bern", "Australia": "Canberra", "Vietnam": "Hanoi", "Thailand": "Bangkok",
    "England": "London", "the United Kingdom": "London", "the United States": "Washington", "the USA": "Washington",
    "the Netherlands": "Amsterdam", "Argentina": "Buenos Aires", "South Korea": "Seoul", "Croatia": "Zagreb",
}

# (English, language) -> translation
TRANSLATIONS: dict[tuple[str, str], str] = {
    ("thank you", "French"): "merci", ("thank you", "German"): "danke", ("thank you", "Spanish"): "gracias",
    ("thank you", "Japanese"): "ありがとう", ("hello", "French"): "bonjour", ("hello", "German"): "hallo",
    ("hello", "Spanish"): "hola", ("hello", "Japanese"): "こんにちは", ("hello", "Russian"): "привет",
    ("hello", "Chinese"): "你好", ("coffee", "French"): "café", ("coffee", "Spanish"): "café",
    ("street", "German"): "Straße", ("door", "German"): "Tür", ("beautiful", "German"): "schön",
    ("child", "Spanish"): "niño", ("tomorrow", "Spanish"): "mañana", ("school", "French"): "école",
    ("water", "French"): "eau", ("water", "German"): "Wasser", ("water", "Spanish"): "agua",
    ("cat", "French"): "chat", ("cat", "German"): "Katze", ("cat", "Spanish"): "gato", ("cat", "Japanese"): "猫",
    ("dog", "French"): "chien", ("dog", "German"): "Hund", ("dog", "Spanish"): "perro",
    ("sun", "French"): "soleil", ("sun", "German"): "Sonne", ("sun", "Spanish"): "sol",
}

EMOJI: dict[str, str] = {
    "rocket": "🚀", "cat": "🐱", "dog": "🐶", "heart": "❤️", "star": "⭐", "fire": "🔥", "sun": "☀️", "pizza": "🍕",
    "snake": "🐍", "fox": "🦊", "tree": "🌳", "flag": "🏁", "clock": "⏰", "book": "📖", "fish": "🐟", "family": "👨‍👩‍👧",
    "thumbs up": "👍", "smile": "😊",
}

OPPOSITES: dict[str, str] = {
    "hot": "cold", "big": "small", "fast": "slow", "up": "down", "left": "right", "day": "night", "good": "bad",
    "open": "closed", "old": "new", "happy": "sad", "light": "dark", "full": "empty", "early": "late", "hard": "soft",
    "high": "low", "rich": "poor", "wet": "dry", "loud": "quiet", "strong": "weak", "first": "last",
}

# Asked for with "Does jaxserve support X?" and so on.
SUPPORTED = [
    "streaming", "JSON schemas", "regular expressions", "the OpenAI API", "speculative decoding", "tensor parallelism",
    "chunked prefill", "continuous batching", "paged attention", "prefix caching", "a radix cache", "sliding windows", "Llama",
    "Mistral", "Qwen", "Gemma", "int8 quantization", "log probabilities", "stop strings", "safetensors", "structured output",
    "tools", "tool calling", "function calling", "parallel tool calls", "thinking", "reasoning", "reasoning parsers",
    "the Anthropic API", "the Ollama API", "the Responses API", "sessions", "scoring", "hidden states", "n-gram speculation",
    "EBNF grammars", "structural tags", "response_format", "JSON", "quantization", "mixture-of-experts models", "priorities",
    "weight updates", "Orbax", "TLS", "logit_bias", "seeds", "logprobs", "input embeddings", "logit processors",
    "metrics", "Prometheus metrics",
]
NOT_SUPPORTED = [
    "images", "image input", "audio", "video", "LoRA", "LoRA adapters", "embeddings", "embedding models",
    "pipeline parallelism", "several machines", "data parallelism",
    "reranking", "vision models", "fine-tuning", "training", "beam search", "speech", "image generation",
]

STORY = (
    "Once upon a time there was a little {animal} who lived in a forest. One day the {animal} found a shiny key. It walked "
    "over the hill until it came to a small door. The key fitted, the door opened, and all the friends of the {animal} "
    "were waiting with a big cake. The end."
)
ANIMALS = ["fox", "rabbit", "bear", "mouse", "owl", "cat", "dog", "horse", "frog", "wolf", "bird", "lion",
           "dragon", "robot", "princess", "wizard", "knight", "penguin", "monkey", "turtle", "child", "boy", "girl"]

NAMES = (
    "Maria John Anna Peter Sofia Paul Emma Lukas Alice Bob Clara David Elena Frank Greta Henry Ida Jack Kate Leo Mona "
    "Nina Oscar Paula Ravi Sara Tom Uma Victor Wendy Yuki Zara José Zoë Björn Chloé Jürgen Łukasz Søren Renée Amir "
    "Fatima Chen Wei Priya Ahmed Olga Ivan Marta Diego Lucía Hugo Ines Karl Lena Max Nora Omar Pia Rosa Sven Tina Ulla "
    "James Mary Robert Linda Michael Susan William Karen Daniel Laura Ben Eve Sam Amy Tim Joe Jane Lisa Mark Carol Alan "
    "Grace Ada Linus Steve George Helen Nancy Ruth Walter"
).split()
PLACES = [
    "Paris", "London", "Berlin", "Madrid", "Rome", "Tokyo", "Oslo", "Vienna", "Lisbon", "Cairo", "Lima", "Boston",
    "Chicago", "Seattle", "Dublin", "Athens", "Prague", "Warsaw", "Zürich", "München", "Köln", "São Paulo", "Málaga",
    "Kraków", "New York", "San Francisco", "Hong Kong", "Sydney", "Delhi", "Mumbai", "Nairobi", "Toronto", "Austin",
    "Denver", "Geneva", "Milan", "Naples", "Porto", "Hamburg", "Munich", "Lyon", "Nice", "Kyoto", "Osaka", "Seoul",
    "Singapore", "Dubai", "Helsinki", "Stockholm", "Copenhagen", "Brussels", "Amsterdam", "Barcelona", "Bern",
]
JOBS = (
    "teacher doctor engineer baker pilot nurse writer painter farmer lawyer singer driver cook student scientist plumber "
    "judge actor dentist gardener"
).split()
COLORS = "red blue green yellow black white orange purple brown pink gray silver".split()
ITEMS = (
    "apple pear plum book pen lamp chair table cup hat shirt ticket flower phone bag ball cake egg melon peach lemon box "
    "coat key ring stamp"
).split()
WORDS = (
    "the sea is calm today and we like to walk on green hills after rain with old friends from far away who bring bread "
    "milk cheese honey music light wind stone river mountain cloud snow summer winter spring autumn early late little "
    "large round quick brown jumps over lazy small red house open window door garden tree bird sings every morning "
    "before work people read news write letters drink tea play games learn new things make time for family run fast "
    "slow cache page batch model server kernel request prompt answer data code test build ship good night sweet dreams"
).split()
FOREIGN = [
    "café", "naïve", "Straße", "señor", "日本", "привет", "你好", "über", "façade", "🚀", "🔥", "😊", "é", "ñ", "🐍", "👍",
]
