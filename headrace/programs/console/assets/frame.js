// SPDX-License-Identifier: Apache-2.0
// The frame of all pages: navigation, theme and keyboard shortcuts.

import { entitle, setText } from "./dom.js";

const THEMES = { auto: ["Auto", "as the system"], light: ["Light", "light"], dark: ["Dark", "dark"] };

function theme(name) {
  const button = document.getElementById("theme-button");
  document.documentElement.dataset.theme = name;
  localStorage.setItem("headrace-theme", name);
  setText(button, THEMES[name][0]);
  button.setAttribute("aria-label", `Colours: ${THEMES[name][1]}`);
}

// `pages`: by the first part of the URL after `#/`, a function that fills `main` and returns a clean-up function.
// Returns a function that shows the page that the URL names.
export function frame(pages, first) {
  const main = document.getElementById("main");
  let leave = null;

  function show() {
    const [, name = first, ...rest] = location.hash.split("/");
    const page = pages[name] ? name : first;
    leave?.();
    for (const link of document.querySelectorAll("nav a")) {
      if (link.getAttribute("href") === `#/${page}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    leave = pages[page](main, rest.join("/")) || null;
    entitle(main.querySelector("h1").textContent);
    if (document.activeElement === document.body) main.focus({ preventScroll: true });
  }

  window.addEventListener("hashchange", () => {
    show();
    main.focus();
  });
  document.getElementById("skip").addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
  document.getElementById("theme-button").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    theme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
  });
  document.addEventListener("keydown", (event) => {
    const field = document.getElementById("search");
    if (event.key === "/" && field && !/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) {
      event.preventDefault();
      field.focus();
    }
  });
  const kept = localStorage.getItem("headrace-theme");
  theme(THEMES[kept] ? kept : "auto");
  return show;
}
