// What a person would see as wrong with the texts of a page: `texts.overlaps()` and `texts.cutOff()` list it.
const texts = {
  overlaps() {
    const boxes = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const node = walker.currentNode, parent = node.parentElement;
      if (!node.textContent.trim() || parent.closest("script, style, noscript, select, svg")) continue;
      if (parent.closest("details:not([open])") && !parent.closest("summary")) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      for (const box of range.getClientRects()) {
        if (box.width > 1 && box.height > 1) boxes.push([box, node.textContent.trim()]);
      }
    }
    for (const text of document.querySelectorAll("svg text")) {
      const box = text.getBoundingClientRect();
      if (text.textContent.trim() && box.width > 1) boxes.push([box, text.textContent]);
    }
    const found = [];
    boxes.forEach(([a, one], place) => boxes.slice(place + 1).forEach(([b, other]) => {
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 2 && high > 4) found.push(one.slice(0, 40) + " | " + other.slice(0, 40));
    }));
    return found;
  },
  cutOff() {
    const found = [];
    if (document.documentElement.scrollWidth > window.innerWidth + 1) found.push("the page is wider than the window");
    for (const text of document.querySelectorAll("svg text")) {
      const box = text.getBoundingClientRect(), around = text.ownerSVGElement.getBoundingClientRect();
      const isOut = box.left < around.left - 1 || box.right > around.right + 1;
      if (text.textContent.trim() && (isOut || box.bottom > around.bottom + 1 || box.top < around.top - 1)) {
        found.push("outside its drawing: " + text.textContent);
      }
    }
    for (const node of document.querySelectorAll("main *")) {
      if (node.closest("svg, details:not([open])") || !node.clientWidth) continue;
      const isHidden = getComputedStyle(node).overflowX !== "visible";
      if (isHidden && node.scrollWidth > node.clientWidth + 1) found.push("cut off: " + node.textContent.slice(0, 60));
    }
    return found;
  },
};
