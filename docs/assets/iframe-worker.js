/* Search in pages opened from disk: browsers start no workers there, so the search runs in a hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html>";
      this.inside = new Promise((loaded) => {
        frame.onload = () => {
          const inside = frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          inside.importScripts = () => {}; // stemmers of other languages, which an English site has none of
          const script = inside.document.createElement("script");
          script.src = new URL(url, location.href).href;
          script.onload = () => loaded(inside);
          inside.document.head.append(script);
        };
      });
      document.body ? document.body.append(frame) : addEventListener("load", () => document.body.append(frame));
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
  };
}
