"""The runner's side of the Session stream: what it holds, what it says, and how it gets over a KV manager's absence."""
