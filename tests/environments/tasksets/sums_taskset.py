"""A taskset of verifiers: sums, with a tool for them if the options say so."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class Adding(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """The sum of two numbers."""
        return str(a + b)


class SumConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig | None = None


class Sum(vf.Task[SumData, vf.State, SumConfig]):
    @classmethod
    def toolsets(cls, config: SumConfig) -> list[vf.Toolset]:
        return [Adding(config.tools)] if config.tools else []

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "raise":
            raise LookupError("the scorer is lost")
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def characters(self, trace: vf.Trace) -> float:
        return float(sum(len(message.content or "") for message in trace.assistant_messages))


class SumsConfig(vf.TasksetConfig):
    largest: int = 3
    task: SumConfig = SumConfig()


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        for number in range(self.config.largest + 1):
            data = SumData(prompt=f"{number}+{number}", system_prompt="Say it.", answer=str(2 * number))
            yield Sum(data, self.config.task)


__all__ = ["Sums"]
if __name__ == "__main__":
    Adding.run()
