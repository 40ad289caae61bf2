// A click on a picture shows it as large as the window; another one, or Escape, puts it back.
const enlarge = (image) => {
  for (const other of document.querySelectorAll("img.enlarged")) {
    if (other !== image) other.classList.remove("enlarged");
  }
  image?.classList.toggle("enlarged");
};
document.addEventListener("click", (event) =>
  enlarge(event.target.matches(".md-content img") ? event.target : null),
);
document.addEventListener("keydown", (event) => event.key === "Escape" && enlarge(null));
