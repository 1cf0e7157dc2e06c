"""Reading the pages that the library writes: what is in them, and that they are well formed and load nothing."""

import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """Tags, attributes and texts; every tag that is opened is closed in its place."""

    VOID = ("meta",)

    def __init__(self, source):
        super().__init__()
        self.tags, self.attributes, self.open, self.texts = [], [], [], []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in self.VOID:
            self.open.append((tag, dict(attrs).get("class") or ""))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if not any(tag in ("style", "script", "title") for tag, _ in self.open):
            self.texts.append(data)


def check_loads_nothing(source):
    page = Page(source)
    assert not {"img", "link", "iframe", "object", "form", "a"} & set(page.tags)
    assert not [key for _, key, _ in page.attributes if key in ("src", "href", "srcset") or key.startswith("on")]
    assert [value for tag, _, value in page.attributes if tag == "meta" and "default-src 'none'" in value]
    assert not re.search(r"https?://|@import|url\(", source)


def page_in_notebook(piece):
    """The page in a piece of a notebook, and the height that it takes there."""
    frame = Page(piece)
    assert frame.tags == ["iframe"]
    assert frame.texts == []
    attributes = {key: value for _, key, value in frame.attributes}
    assert attributes.keys() == {"sandbox", "style", "srcdoc"}
    assert attributes["sandbox"] == "allow-scripts"  # not `allow-same-origin`: the notebook is out of reach
    return attributes["srcdoc"], int(re.search(r"height: (\d+)px", attributes["style"])[1])
