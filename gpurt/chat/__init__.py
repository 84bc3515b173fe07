r"""Chat: a conversation in the terminal, or through a pipe.

  source (typed, or piped) -> Chat -> commands           what a line means
                              |   \-> Conversation       messages; cut to the context; their file
                              Reply -> screen            Markdown on a terminal, text in a pipe

Every turn is one request that carries the whole chat.
"""

from gpurt.chat.chat import Chat
from gpurt.chat.conversation import Conversation, Settings

__all__ = ["Chat", "Conversation", "Settings"]
