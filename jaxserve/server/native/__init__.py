"""SGLang's own request and reply: POST /generate, /tokenize and /detokenize, and what the Engine shares with them."""
