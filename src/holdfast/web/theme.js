// Light or dark: what the system prefers, unless somebody has chosen. Kept by this browser only.

const KEY = "holdfast.theme";
const CHOICES = ["system", "light", "dark"];

export function chosenTheme() {
  try {
    const kept = localStorage.getItem(KEY);
    return CHOICES.includes(kept) ? kept : "system";
  } catch {
    return "system"; // storage may be forbidden; the preference then lasts as long as the page
  }
}

export function chooseTheme(choice) {
  document.documentElement.dataset.theme = choice;
  try {
    localStorage.setItem(KEY, choice);
  } catch {
    return;
  }
}

export function nextTheme() {
  return CHOICES[(CHOICES.indexOf(document.documentElement.dataset.theme) + 1) % CHOICES.length];
}

document.documentElement.dataset.theme = chosenTheme();
