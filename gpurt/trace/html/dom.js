// DOM: elements from code. Text is always set as text: a trace's names are never read as HTML.

/** make("button", {class: "x", onclick: f}, "text", child, ..); null children are left out. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style")
      for (const rule of Object.entries(value)) element.style.setProperty(...rule);
    else if (value !== null && value !== false)
      element.setAttribute(name, value === true ? "" : value);
  }
  return fill(element, ...children);
}

/** Makes `children` all that an element holds; null ones are left out. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null));
  return element;
}

export function byId(id) {
  return document.getElementById(id);
}
