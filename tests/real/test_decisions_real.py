"""Decisions of the real pair: the numbers are the models' own, and the page is written."""

import pytest
import torch

pytestmark = pytest.mark.real

PROMPT = "The capital of France is"


def test_decisions_are_what_both_models_say(ensemble, tmp_path):
    inputs = ensemble.tokenizer(PROMPT, return_tensors="pt")
    output = ensemble.generate(
        **inputs, method="gac", max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_decisions=True
    )
    [decisions] = output.decisions
    texts = [decision.text for decision in decisions]
    assert PROMPT + "".join(texts) == ensemble.tokenizer.decode(output.sequences[0])
    for index, (model, tokenizer) in enumerate(zip(ensemble.members, ensemble.tokenizers, strict=True)):
        ids = tokenizer(PROMPT, return_tensors="pt").input_ids
        probs = model(ids).logits[0, -1].detach().float().softmax(-1)
        [chosen] = tokenizer(texts[0], add_special_tokens=False).input_ids
        said = decisions[0].members[index]
        assert said.probability == pytest.approx(float(probs[chosen]), rel=1e-3)
        assert [entry.probability for entry in said.best] == pytest.approx(
            torch.topk(probs, 5).values.tolist(), rel=1e-3
        )
        assert said.best[0].text == tokenizer.decode([int(probs.argmax())])
    output.decisions.to_html(tmp_path / "page.html")
    assert "Paris" in (tmp_path / "page.html").read_text("utf-8")
