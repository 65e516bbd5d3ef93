// Applied before the first paint: the theme that was chosen here before, or the system's.
(() => {
  const names = ["auto", "light", "dark"];
  const saved = localStorage.getItem("baton.theme");
  let name = names.includes(saved) ? saved : "auto";

  function apply() {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
  }

  apply();
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => {
      document.getElementById("theme-name").textContent = name;
      button.setAttribute("aria-label", `Theme: ${name}`);
    };
    show();
    button.addEventListener("click", () => {
      name = names[(names.indexOf(name) + 1) % names.length];
      localStorage.setItem("baton.theme", name);
      apply();
      show();
      dispatchEvent(new Event("themechange"));
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("themechange")));
  });
})();
