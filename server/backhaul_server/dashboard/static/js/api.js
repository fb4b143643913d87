// Shows /api/v1/openapi.json with Swagger UI, in the theme of the dashboard.
"use strict";
{
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const colour = () => root.classList.toggle("dark-mode", (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark");
  colour();
  dark.addEventListener("change", colour);
  SwaggerUIBundle({ url: "api/v1/openapi.json", dom_id: "#api", deepLinking: true, validatorUrl: null });
}
