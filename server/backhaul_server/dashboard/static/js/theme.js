// Runs before the page is drawn, so that the page never flashes in a theme other than the remembered one.
"use strict";
{
  const KEY = "backhaul-theme";
  const NEXT = { auto: "light", light: "dark", dark: "auto" };
  const root = document.documentElement;

  let theme = "auto";
  try {
    theme = localStorage.getItem(KEY) in NEXT ? localStorage.getItem(KEY) : theme;
  } catch {
    // storage may be forbidden; the theme then lasts as long as the page
  }
  const apply = () => {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
  };
  apply();

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    if (button === null) return;
    const label = () => {
      const text = `Theme: ${theme === "auto" ? "as the system" : theme}`;
      button.setAttribute("aria-label", text);
      button.title = text;
      button.querySelector("use")?.setAttribute("href", `#icon-${theme}`);
    };
    const announce = () => document.dispatchEvent(new Event("themechange"));
    label();
    button.addEventListener("click", () => {
      theme = NEXT[theme];
      try {
        localStorage.setItem(KEY, theme);
      } catch {
        // storage is blocked: the theme then lasts until the page is closed
      }
      apply();
      label();
      announce();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", announce);
  });
}
