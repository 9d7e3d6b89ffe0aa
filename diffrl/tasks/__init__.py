"""Small, complete tasks to train on: prompts, pictures, a shipped model and the script that made it."""
