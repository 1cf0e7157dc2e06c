"""Draw a picture of one answer: what each member writes alone, and which member decided each part of the joint answer.

python examples/study/decisions_picture.py --members smollm2-gsm-lora-s0 gemma-gsm-lora-s0 --output docs/images/decisions.svg
"""

import argparse
import html
import textwrap
from collections.abc import Sequence
from pathlib import Path

from cells import read_examples
from marks import evaluation_set
from trained import load

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Colours of the members, from Okabe and Ito's palette."""

WIDTH, SIZE, LINE = 76, 13, 22
"""Characters per line, size of a letter and height of a line in pixels."""
LETTER = 0.602 * SIZE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("study"), help="of the study")
    parser.add_argument("--members", nargs="+", required=True)
    parser.add_argument("--task", default="gsm_test_a", help="name of the set")
    parser.add_argument("--find", default="Andy plants", help="what the question holds")
    parser.add_argument("--method", default="gac")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, required=True, help="a file that ends in .svg")
    args = parser.parse_args()

    questions = evaluation_set(args.task, read_examples(args.folder, args.task))
    item = next(item for item in questions.items if args.find in item.prompt)
    ensemble = load(args.folder, args.members, args.device, args.dtype)
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}

    def answer(model, **more):
        inputs = model.tokenizer(item.prompt, return_tensors="pt").to(args.device)
        output = model.generate(**inputs, **options, return_dict_in_generate=True, **more)
        text = model.tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return output, text, questions.is_right(text, item)

    names = [name.partition("-")[0] for name in args.members]
    titles = [{"smollm2": "SmolLM2-135M", "gemma": "Gemma-3-270M"}.get(name, name) for name in names]
    picture = Picture()
    picture.text(item.prompt.removesuffix("\nAnswer:"))
    for place, title in enumerate(titles):
        _, text, right = answer(ensemble.alone(place))
        picture.head(f"{title} alone: {'right' if right else 'wrong'}", COLORS[place])
        picture.text(text.strip())
        print(f"{title}: {right}, {text!r}")
    output, text, right = answer(ensemble, method=args.method, output_decisions=True)
    print(f"together: {right}, {text!r}")
    picture.head(f"together: {'right' if right else 'wrong'}", "#222")
    decisions = [one for one in output.decisions[0] if one.text]
    # Text after the answer's last line is not part of the answer.
    picture.pieces([(one.text, one.decided_by, len(one.agreeing) < len(titles)) for one in decisions])
    picture.legend(titles)
    args.output.write_text(picture.svg(), "utf-8")


class Picture:
    """Lines of monospaced text, from top to bottom."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.y = 0.0

    def text(self, text: str) -> None:
        """Plain text, broken into lines."""
        for line in (part for own in text.split("\n") for part in textwrap.wrap(own, WIDTH)):
            self.y += LINE
            self.parts.append(self.letters(line, 0, "#222"))

    def head(self, title: str, color: str) -> None:
        """A heading that says who wrote the text below."""
        self.y += 1.4 * LINE
        self.parts.append(
            f'<text x="12" y="{self.y:.0f}" fill="{color}" font-weight="bold">{html.escape(title)}</text>'
        )

    def letters(self, text: str, column: float, color: str) -> str:
        return (
            f'<text x="{12 + column * LETTER:.1f}" y="{self.y:.0f}" fill="{color}" xml:space="preserve" '
            f'textLength="{len(text) * LETTER:.1f}">{html.escape(text)}</text>'
        )

    def pieces(self, pieces: Sequence[tuple[str, int | None, bool]]) -> None:
        """Pieces of a text, each with the member that decided it and whether the members disagreed."""
        self.y += LINE
        column = 0
        for text, who, is_split in pieces:
            for n, part in enumerate(text.split("\n")):
                if n or column + len(part) > WIDTH:
                    self.y, column = self.y + LINE, 0
                    part = part.lstrip(" ")
                if not part:
                    continue
                color = "#888" if who is None else COLORS[who]
                x, width = 12 + column * LETTER, len(part) * LETTER
                strength = 0.75 if is_split else 0.15
                self.parts.append(
                    f'<rect x="{x + 0.5:.1f}" y="{self.y - SIZE - 1:.0f}" width="{width - 1:.1f}" height="{SIZE + 6}" '
                    f'rx="2" fill="{color}" fill-opacity="{strength}"/>'
                )
                self.parts.append(self.letters(part, column, "#fff" if is_split else "#222"))
                column += len(part)

    def legend(self, titles: Sequence[str]) -> None:
        """A legend of the members' colours."""
        self.y += 1.6 * LINE
        said = [(f"{title} gave it more", color) for title, color in zip(titles, COLORS, strict=False)]
        for n, (what, color) in enumerate([*said, ("dark: the members wanted different tokens", "#888")]):
            y = self.y + n * LINE
            self.parts.append(f'<rect x="12" y="{y - 11:.0f}" width="12" height="12" rx="2" fill="{color}"/>')
            self.parts.append(f'<text x="30" y="{y:.0f}" fill="#222">{html.escape(what)}</text>')
        self.y += len(said) * LINE

    def svg(self) -> str:
        """The whole picture."""
        width, height = 24 + WIDTH * LETTER, self.y + 14
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-size="{SIZE}" '
            f'font-family="ui-monospace, Menlo, Consolas, monospace"><rect width="{width:.0f}" height="{height:.0f}" '
            f'fill="#fff"/>\n{chr(10).join(self.parts)}\n</svg>\n'
        )


if __name__ == "__main__":
    main()
